"""Tree -> structs, driven by the shapes of the types; reports everything that is wrong, not only the first.

A part that is wrong decodes to `BROKEN`; what holds a broken part is broken too and says nothing more.
"""

from __future__ import annotations

from typing import Any, assert_never

from kvir.policy_ir import describe, scalars
from kvir.policy_ir.diagnostic import MAX_COUNTED, Label, Report
from kvir.policy_ir.scalars import BROKEN, BrokenValue
from kvir.policy_ir.shape import (
    Choice,
    Field,
    Flag,
    Form,
    Many,
    OneOf,
    Range,
    Real,
    Record,
    Shape,
    Text,
    Whole,
    WordOr,
    form,
)
from kvir.policy_ir.source import Broken, Mapping, Scalar, Sequence, Source, Span, Tree, entry, span_of


class Decoder:
    """Decodes one source into one report."""

    def __init__(self, source: Source, report: Report) -> None:
        self._source = source
        self._report = report

    def value(self, node: Tree, shape: Shape, *, optional: bool = False, listed: bool = False) -> Any:
        """The value of a node, or `BROKEN`; `optional` fields and `listed` values get other help."""
        if isinstance(node, Broken) or self._report.error_count >= MAX_COUNTED:
            return BROKEN
        if scalars.is_nothing(node) and not isinstance(shape, Text):
            help = f"write {describe.expected(shape)}" + (", or leave the field out" if optional else "")
            self._report.error("KV028", "a value is missing here", span_of(node), help=help)
            return BROKEN
        match shape:
            case Whole():
                return scalars.whole(node, shape, self._report)
            case Real():
                return scalars.real(node, shape, self._report)
            case Text():
                return scalars.text(node, shape, self._report)
            case Flag():
                return scalars.flag(node, shape, self._report)
            case Choice():
                return scalars.choice(node, shape, self._report)
            case Range():
                value, self._source.views[node] = scalars.index_range(node, shape, self._report)
                return value
            case WordOr(word=word, item=item):
                if isinstance(node, Scalar) and node.text == word:
                    return None
                if isinstance(node, Scalar) and isinstance(item, Whole) and not scalars.looks_numeric(node):
                    return self._wrong(node, shape)
                return self.value(node, item)
            case Many():
                return self._many(node, shape)
            case Record():
                if isinstance(node, Mapping):
                    return self._fields(node, form(shape.cls))
                return self._wrong(node, shape)
            case OneOf():
                return self._tagged(node, shape, listed=listed)
            case _:
                assert_never(shape)

    # ---- lists and unions ----------------------------------------------------------------------------------

    def _many(self, node: Tree, shape: Many) -> Any:
        if isinstance(node, Sequence):
            items = [self.value(item, shape.item, listed=True) for item in node.items]
        elif shape.lone:
            items = [self.value(node, shape.item, listed=True)]
            self._source.views.setdefault(node, {})[0] = node
        else:
            return self._wrong(node, shape)
        high = shape.max_length
        if len(items) < shape.min_length or (high is not None and len(items) > high):
            help = f"write {describe.expected(shape)}"
            self._report.error("KV023", f"the list has {len(items)} items", span_of(node), help=help)
            return BROKEN
        return BROKEN if any(item is BROKEN for item in items) else tuple(items)

    def _tagged(self, node: Tree, shape: OneOf, *, listed: bool = False) -> Any:
        match node:
            case Scalar() if scalars.looks_numeric(node):
                return self._wrong(node, shape)
            case Scalar():
                if node.text not in shape.by_tag:
                    return self._unknown_tag(node, shape)
                struct = form(shape.by_tag[node.text])
                if struct.may_be_bare:
                    return struct.cls()
                message = f"{struct.title} needs {describe.fields_needed(struct)}"
                help = f"write {describe.example(struct)}"
                self._report.error("KV021", message, span_of(node), help=help)
                return BROKEN
            case Mapping(entries=[(Scalar() as key, inner)]):
                if key.text not in shape.by_tag:
                    return self._unknown_tag(key, shape)
                return self._payload(node, inner, form(shape.by_tag[key.text]))
            case Mapping() if sum(_is_tag(key, shape) for key, _ in node.entries) > 0:
                return self._several_tags(node, shape, listed=listed)
            case _:
                return self._wrong(node, shape)

    def _payload(self, node: Tree, inner: Tree, struct: Form) -> Any:
        """What follows a tag: the fields as a mapping, or the value of the only required field."""
        if isinstance(inner, Mapping):
            value = self._fields(inner, struct)
            inside = {k.text: v for k, v in reversed(inner.entries) if isinstance(k, Scalar)}
            self._source.views[node] = {**inside, **self._source.views.get(inner, {})}
            return value
        if isinstance(inner, Broken):
            return BROKEN
        field = struct.short_field
        if field is not None:
            self._source.views[node] = {field.name: inner}
            value = self.value(inner, field.shape)
            return BROKEN if value is BROKEN else struct.cls(**{field.name: value})
        if not struct.fields:
            help = f"write {struct.title} alone"
            self._report.error("KV022", f"{struct.title} takes no value", span_of(inner), help=help)
            return BROKEN
        message = f"expected the fields of {struct.title}, found {describe.found(inner)}"
        self._report.error("KV022", message, span_of(inner), help=f"write {describe.example(struct)}")
        return BROKEN

    # ---- fields --------------------------------------------------------------------------------------------

    def _fields(self, node: Mapping, struct: Form) -> Any:
        values: dict[str, Any] = {}
        given: dict[str, Scalar] = {}  # key as written -> where
        by_field: dict[str, Scalar] = {}  # field -> its key
        broken = False
        for key, inner in node.entries:
            if not isinstance(key, Scalar):
                broken = True
                self._not_a_name(key, struct)
                continue
            if key.text in given:
                broken = True
                self._twice(key, given[key.text])
                self._check(inner, struct.field(key.text))
                continue
            given[key.text] = key
            field = struct.field(key.text)
            if field is None:
                broken = True
                guess = self._unknown_field(key, node, struct)
                if guess is not None:
                    by_field.setdefault(guess.name, key)
                    self._check(inner, guess)
                continue
            if field.name in by_field and field.inline:
                broken = True
                self._two_of(key, by_field[field.name], field, struct)
                self._check(inner, field, key)
                continue
            by_field[field.name] = key
            values[field.name] = self._field(node, key, inner, field)
        broken |= self._expand(node, values, by_field, struct)
        broken |= self._missing(node, by_field, struct)
        if broken or any(value is BROKEN for value in values.values()):
            return BROKEN
        return struct.cls(**values)

    def _field(self, node: Mapping, key: Scalar, inner: Tree, field: Field) -> Any:
        if not field.inline:
            return self.value(inner, field.shape, optional=not field.required)
        assert isinstance(field.shape, OneOf)
        part = Mapping(key.start, max(key.end, inner.end), [(key, inner)])
        self._source.views.setdefault(node, {})[field.name] = part
        return self._tagged(part, field.shape)

    def _check(self, node: Tree, field: Field | None, key: Scalar | None = None) -> None:
        """Look for further errors in a value that is not used."""
        if field is None:
            return
        if isinstance(field.shape, OneOf) and field.inline:
            tagged = None if key is None else field.shape.by_tag.get(key.text)
            if tagged is not None:
                self._payload(Broken(node.start, node.end), node, form(tagged))
            return
        self.value(node, field.shape)

    def _expand(
        self, node: Mapping, values: dict[str, Any], by_field: dict[str, Scalar], struct: Form
    ) -> bool:
        """Replace the key that stands for several fields by those fields; whether that went wrong."""
        sugar = struct.sugar
        if sugar is None or sugar.name not in by_field:
            return False
        key = by_field.pop(sugar.name)
        preset = values.pop(sugar.name, BROKEN)
        clash = by_field.get("keep")
        by_field.setdefault("keep", key)
        if clash is not None:
            label = Label(span_of(clash), "given here")
            message = f"`{sugar.name}` already says what to keep"
            self._report.error("KV033", message, span_of(key), labels=(label,), help="keep one of the two")
            return True
        if preset is BROKEN:
            return True
        found = entry(node, sugar.name)
        assert found is not None
        for name, value in preset.fields().items():
            if name not in by_field or name == "keep":
                values[name] = value
                self._source.views.setdefault(node, {})[name] = found[1]
        return False

    def _missing(self, node: Mapping, by_field: dict[str, Scalar], struct: Form) -> bool:
        missing = [f for f in struct.fields.values() if f.required and f.name not in by_field]
        span = span_of(node.entries[0][0]) if node.entries else Span(node.start, node.start + 1)
        for field in missing:
            if isinstance(field.shape, OneOf) and field.inline:
                message = f"{struct.title} lacks its {field.shape.title}"
                help = f"add one of {', '.join(f'`{tag}: ...`' for tag in field.shape.by_tag)}"
            else:
                message = f"{struct.title} lacks the field `{field.name}`"
                help = f"add `{field.name}: ...`, {describe.expected(field.shape)}"
                if struct.sugar is not None and field.name == "keep":
                    help += f", or `{struct.sugar.name}: ...`"
            self._report.error("KV021", message, span, help=help)
        return bool(missing)

    # ---- findings ------------------------------------------------------------------------------------------

    def _wrong(self, node: Tree, shape: Shape) -> BrokenValue:
        return scalars.wrong(node, shape, self._report)

    def _not_a_name(self, key: Tree, struct: Form) -> None:
        if not isinstance(key, Broken):
            message = f"a key is {describe.found(key)}; only names are keys"
            self._report.error("KV032", message, span_of(key), help=describe.field_list(struct))

    def _twice(self, key: Scalar, before: Scalar) -> None:
        label = Label(span_of(before), "first given here")
        message = f"the field {describe.quote(key.text)} is given twice"
        self._report.error("KV024", message, span_of(key), labels=(label,), help="keep one of the two")

    def _two_of(self, key: Scalar, before: Scalar, field: Field, struct: Form) -> None:
        assert isinstance(field.shape, OneOf)
        label = Label(span_of(before), "the first one")
        message = f"{struct.title} has two {field.shape.title}s"
        self._report.error("KV029", message, span_of(key), labels=(label,), help="keep one of the two")

    def _unknown_field(self, key: Scalar, node: Mapping, struct: Form) -> Field | None:
        """Reports it; returns the field that was meant, if that is clear and the field is not there."""
        message = f"unknown field {describe.quote(key.text)}"
        own = struct.fields.get(key.text)
        if own is not None and isinstance(own.shape, OneOf):
            # the field has no key: its tags stand in its place
            note = f"a {own.shape.title} is given by its kind"
            help = f"write one of {', '.join(f'`{tag}: ...`' for tag in own.shape.by_tag)}"
            self._report.error("KV020", message, span_of(key), note=note, help=help)
            return own
        guess = None if self._report.is_full else describe.closest(key.text, struct.keys)
        help = f"did you mean `{guess}`?" if guess else describe.field_list(struct)
        note = f"not a field of {struct.title}"
        self._report.error("KV020", message, span_of(key), note=note, help=help)
        return struct.field(guess) if guess and entry(node, guess) is None else None

    def _unknown_tag(self, node: Scalar, shape: OneOf) -> BrokenValue:
        help = () if self._report.is_full else describe.choose(node.text, tuple(shape.by_tag))
        head, colon, rest = node.text.partition(":")
        if colon and head in shape.by_tag:
            help = f"put a space after the colon: `{{{head}: {rest.strip()}}}`"
        message = f"unknown {shape.title} {describe.quote(node.text)}"
        self._report.error("KV025", message, span_of(node), help=help)
        return BROKEN

    def _several_tags(self, node: Mapping, shape: OneOf, *, listed: bool) -> BrokenValue:
        spans = [span_of(key) for key, _ in node.entries]
        names = [key.text for key, _ in node.entries if isinstance(key, Scalar)]
        message = f"one pair of braces holds several {shape.title}s"
        label = Label(spans[0], "the first one")
        apart = ", ".join(f"{{{name}: ...}}" for name in names)
        help = f"write a list, one {shape.title} each: [{apart}]" if listed else "keep one of them"
        self._report.error("KV029", message, spans[1], labels=(label,), help=help)
        for key, inner in node.entries:
            if isinstance(key, Scalar) and key.text in shape.by_tag:
                self._payload(Broken(node.start, node.end), inner, form(shape.by_tag[key.text]))
        return BROKEN


def _is_tag(key: Tree, shape: OneOf) -> bool:
    return isinstance(key, Scalar) and key.text in shape.by_tag
