"""Tree -> structs, driven by the shapes of the types; reports everything that is wrong, not only the first.

A part that is wrong decodes to `BROKEN`; what holds a broken part is broken too and says nothing more.
"""

from __future__ import annotations

import math
import re
from typing import Any, assert_never

from msgspec import Struct

from kvir.policy_ir import describe
from kvir.policy_ir.diagnostic import Label, Report
from kvir.policy_ir.nodes import IndexRange
from kvir.policy_ir.shape import (
    Choice,
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

MAX_TEXT_LENGTH = 1000
MAX_DIGITS = 18

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?(0|[1-9][0-9]*)?(\.[0-9]+|(?<=[0-9])\.)?([eE][-+]?[0-9]+)?")
_RANGE = re.compile(r"([0-9]{1,18})(?:\.\.([0-9]{1,18}))?")
_NOTHING = ("", "~", "null", "Null", "NULL")


class _BrokenValue:
    """The type of `BROKEN`."""


BROKEN = _BrokenValue()


class Decoder:
    """Decodes one source into one report."""

    def __init__(self, source: Source, report: Report) -> None:
        self._source = source
        self._report = report

    def value(self, node: Tree, shape: Shape, *, optional: bool = False) -> Any:
        """The value of a node, or `BROKEN`."""
        if isinstance(node, Broken):
            return BROKEN
        if _is_nothing(node) and not isinstance(shape, Text):
            help = f"write {describe.expected(shape)}" + (", or leave the field out" if optional else "")
            self._report.error("KV028", "a value is missing here", span_of(node), help=help)
            return BROKEN
        match shape:
            case Whole():
                return self._whole(node, shape)
            case Real():
                return self._real(node, shape)
            case Text():
                return self._text(node, shape)
            case Flag():
                return self._flag(node, shape)
            case Choice():
                return self._choice(node, shape)
            case Range():
                return self._range(node, shape)
            case WordOr():
                if isinstance(node, Scalar) and node.text == shape.word:
                    return None
                if isinstance(node, Scalar) and not _looks_numeric(node):
                    return self._wrong(node, shape)
                return self.value(node, shape.item)
            case Many():
                return self._many(node, shape)
            case Record():
                if isinstance(node, Mapping):
                    return self._fields(node, form(shape.cls))
                return self._wrong(node, shape)
            case OneOf():
                return self._tagged(node, shape)
            case _:
                assert_never(shape)

    # ---- scalars -------------------------------------------------------------------------------------------

    def _whole(self, node: Tree, shape: Whole) -> Any:
        if not isinstance(node, Scalar) or not node.plain or not _looks_numeric(node):
            return self._wrong(node, shape)
        if not _INTEGER.fullmatch(node.text):
            return self._malformed_number(node, "a whole number")
        if len(node.text) > MAX_DIGITS:
            return self._out_of_range(node, shape)
        value = int(node.text)
        low, high = shape.low, shape.high
        if (low is not None and value < low) or (high is not None and value > high):
            return self._out_of_range(node, shape)
        return value

    def _real(self, node: Tree, shape: Real) -> Any:
        if not isinstance(node, Scalar) or not node.plain or not _looks_numeric(node):
            return self._wrong(node, shape)
        if not _NUMBER.fullmatch(node.text) or not any(c.isdigit() for c in node.text):
            return self._malformed_number(node, "a number")
        value = float(node.text)
        inside = (
            math.isfinite(value)
            and (shape.low is None or value >= shape.low)
            and (shape.high is None or value <= shape.high)
            and (shape.above is None or value > shape.above)
            and (shape.below is None or value < shape.below)
        )
        return value if inside else self._out_of_range(node, shape)

    def _text(self, node: Tree, shape: Text) -> Any:
        if not isinstance(node, Scalar):
            return self._wrong(node, shape)
        if node.plain and (node.text in (*_NOTHING, "true", "false") or _NUMBER.fullmatch(node.text)):
            return self._wrong(node, shape)
        limit = shape.max_length or MAX_TEXT_LENGTH
        if not shape.min_length <= len(node.text) <= limit:
            least = f"{shape.min_length} to " if shape.min_length else "at most "
            message = f"the text has {len(node.text)} characters"
            self._report.error("KV030", message, span_of(node), help=f"write {least}{limit} characters")
            return BROKEN
        if not node.text.isprintable():
            message = "the text holds a line break or a character that cannot be printed"
            self._report.error("KV030", message, span_of(node), help="write printable text on one line")
            return BROKEN
        return node.text

    def _flag(self, node: Tree, shape: Flag) -> Any:
        if isinstance(node, Scalar) and node.plain and node.text in ("true", "false"):
            return node.text == "true"
        return self._wrong(node, shape)

    def _choice(self, node: Tree, shape: Choice) -> Any:
        if not isinstance(node, Scalar):
            return self._wrong(node, shape)
        if node.text in shape.words:
            return node.text
        message = f"{describe.quote(node.text)} is not one of the choices"
        self._report.error("KV026", message, span_of(node), help=describe.choose(node.text, shape.words))
        return BROKEN

    def _range(self, node: Tree, shape: Range) -> Any:
        if not isinstance(node, Scalar):
            return self._wrong(node, shape)
        found = _RANGE.fullmatch(node.text)
        if found is None:
            message = f"{describe.quote(node.text)} is not an index range"
            self._report.error("KV027", message, span_of(node), help=describe.range_help(node.text))
            return BROKEN
        # sub-spans are right for plain text; quoted text is one character further in
        at = node.start + (0 if node.plain else 1)
        group = 2 if found[2] else 1
        first = Scalar(at, at + found.end(1), found[1])
        last = Scalar(at + found.start(group), at + found.end(group), found[group])
        self._source.views[node] = {"first": first, "last": last}
        bounds = [self._whole(s, Whole(0, shape.high)) for s in (first, last) if _canonical(s, self._report)]
        if len(bounds) < 2 or BROKEN in bounds:
            return BROKEN
        return IndexRange(first=bounds[0], last=bounds[1])

    # ---- collections ---------------------------------------------------------------------------------------

    def _many(self, node: Tree, shape: Many) -> Any:
        if isinstance(node, Sequence):
            items = [self.value(item, shape.item) for item in node.items]
        elif shape.lone:
            items = [self.value(node, shape.item)]
            self._source.views.setdefault(node, {})[0] = node
        else:
            return self._wrong(node, shape)
        high = shape.max_length
        if len(items) < shape.min_length or (high is not None and len(items) > high):
            help = f"write {describe.expected(shape)}"
            self._report.error("KV023", f"the list has {len(items)} items", span_of(node), help=help)
            return BROKEN
        return BROKEN if any(item is BROKEN for item in items) else tuple(items)

    def _tagged(self, node: Tree, shape: OneOf) -> Any:
        match node:
            case Scalar():
                if node.text not in shape.by_tag:
                    return self._unknown_tag(node, shape)
                struct = form(shape.by_tag[node.text])
                if struct.may_be_bare:
                    return self._build(struct, {})
                need = describe.fields_needed(struct)
                self._report.error(
                    "KV021",
                    f"{struct.title} needs {need}",
                    span_of(node),
                    help=f"write {describe.example(struct)}",
                )
                return BROKEN
            case Mapping(entries=[(Scalar() as key, inner)]):
                if key.text not in shape.by_tag:
                    return self._unknown_tag(key, shape)
                return self._payload(node, inner, form(shape.by_tag[key.text]))
            case Mapping(entries=entries) if any(
                isinstance(k, Scalar) and k.text in shape.by_tag for k, _ in entries
            ):
                return self._several_tags(node, shape)
            case _:
                return self._wrong(node, shape)

    def _payload(self, node: Mapping, inner: Tree, struct: Form) -> Any:
        """What follows a tag: the fields as a mapping, or the value of the only required field."""
        if isinstance(inner, Mapping):
            self._source.views[node] = {
                key.text: value for key, value in reversed(inner.entries) if isinstance(key, Scalar)
            }
            return self._fields(inner, struct)
        field = struct.short_field
        if field is not None:
            self._source.views[node] = {field.name: inner}
            value = self.value(inner, field.shape)
            return BROKEN if value is BROKEN else self._build(struct, {field.name: value})
        if not struct.fields:
            help = f"write {struct.title} alone"
            self._report.error("KV022", f"{struct.title} takes no value", span_of(inner), help=help)
            return BROKEN
        message = f"expected the fields of {struct.title}, found {describe.found(inner)}"
        self._report.error("KV022", message, span_of(inner), help=f"write {describe.example(struct)}")
        return BROKEN

    def _fields(self, node: Mapping, struct: Form) -> Any:
        values: dict[str, Any] = {}
        keys: dict[str, Scalar] = {}
        misspelt: set[str] = set()
        broken = False
        for key, inner in node.entries:
            if isinstance(key, Broken):
                broken = True
                continue
            if not isinstance(key, Scalar):
                message = f"a key is {describe.found(key)}; only names are keys"
                self._report.error("KV032", message, span_of(key), help=describe.field_list(struct))
                broken = True
                continue
            name = key.text
            if name in keys:
                label = Label(span_of(keys[name]), "first given here")
                message = f"the field {describe.quote(name)} is given twice"
                self._report.error(
                    "KV024", message, span_of(key), labels=(label,), help="keep one of the two"
                )
                broken = True
                self._recheck(inner, struct, name)
                continue
            keys[name] = key
            if name not in struct.fields:
                broken = True
                guess = self._unknown_field(key, node, struct)
                if guess is not None:
                    misspelt.add(guess)
                    self._recheck(inner, struct, guess)
                continue
            field = struct.fields[name]
            values[name] = self.value(inner, field.shape, optional=not field.required)
        for field in struct.fields.values():
            if field.required and field.name not in values and field.name not in misspelt:
                broken = True
                message = f"{struct.title} lacks the field `{field.name}`"
                span = Span(node.start, min(node.end, node.start + 1)) if not node.entries else _head(node)
                help = f"add `{field.name}: ...`, {describe.expected(field.shape)}"
                self._report.error("KV021", message, span, help=help)
        if broken or misspelt or any(v is BROKEN for v in values.values()):
            return BROKEN
        return self._build(struct, values)

    def _recheck(self, node: Tree, struct: Form, name: str) -> None:
        """Look for further errors in a value that is not used."""
        if name in struct.fields:
            self.value(node, struct.fields[name].shape)

    def _build(self, struct: Form, values: dict[str, Any]) -> Struct:
        return struct.cls(**values)

    # ---- findings ------------------------------------------------------------------------------------------

    def _wrong(self, node: Tree, shape: Shape) -> _BrokenValue:
        message = f"expected {describe.expected(shape)}, found {describe.found(node)}"
        self._report.error("KV022", message, span_of(node), help=describe.conversion(node, shape))
        return BROKEN

    def _out_of_range(self, node: Scalar, shape: Whole | Real) -> _BrokenValue:
        message = f"{describe.quote(node.text)} is out of range"
        self._report.error("KV023", message, span_of(node), help=f"write {describe.expected(shape)}")
        return BROKEN

    def _malformed_number(self, node: Scalar, what: str) -> _BrokenValue:
        message = f"{describe.quote(node.text)} is not {what}"
        self._report.error("KV031", message, span_of(node), help=describe.number_help(node.text, what))
        return BROKEN

    def _unknown_field(self, key: Scalar, node: Mapping, struct: Form) -> str | None:
        """Reports it; returns the field that was meant, if that is clear and the field is not there."""
        message = f"unknown field {describe.quote(key.text)}"
        guess = describe.closest(key.text, struct.fields)
        help = f"did you mean `{guess}`?" if guess else describe.field_list(struct)
        note = f"not a field of {struct.title}"
        self._report.error("KV020", message, span_of(key), note=note, help=help)
        return guess if guess and entry(node, guess) is None else None

    def _unknown_tag(self, node: Scalar, shape: OneOf) -> _BrokenValue:
        help = describe.choose(node.text, tuple(shape.by_tag))
        head, colon, rest = node.text.partition(":")
        if colon and head in shape.by_tag:
            help = f"put a space after the colon: `{{{head}: {rest.strip()}}}`"
        if _looks_numeric(node):
            return self._wrong(node, shape)
        self._report.error(
            "KV025", f"{describe.quote(node.text)} is not known here", span_of(node), help=help
        )
        return BROKEN

    def _several_tags(self, node: Mapping, shape: OneOf) -> _BrokenValue:
        spans = [span_of(key) for key, _ in node.entries]
        names = [key.text for key, _ in node.entries if isinstance(key, Scalar)]
        listed = ", ".join(f"{{{name}: ...}}" for name in names)
        self._report.error(
            "KV029",
            "one pair of braces holds several terms",
            spans[1],
            labels=(Label(spans[0], "the first one"),),
            help=f"write a list, one term each: [{listed}]",
        )
        for key, inner in node.entries:
            if isinstance(key, Scalar) and key.text in shape.by_tag:
                self._payload(node, inner, form(shape.by_tag[key.text]))
        self._source.views.pop(node, None)
        return BROKEN


def _is_nothing(node: Tree) -> bool:
    return isinstance(node, Scalar) and node.plain and node.text in _NOTHING


def _looks_numeric(node: Scalar) -> bool:
    return node.plain and bool(re.match(r"[-+]?\.?[0-9]|[-+]?\.(inf|nan)", node.text, re.IGNORECASE))


def _canonical(node: Scalar, report: Report) -> bool:
    """Whether an index has no leading zeros, which would read as octal elsewhere."""
    if node.text == "0" or not node.text.startswith("0"):
        return True
    message = f"{describe.quote(node.text)} is not a whole number"
    report.error("KV031", message, span_of(node), help=describe.number_help(node.text, "a whole number"))
    return False


def _head(node: Mapping) -> Span:
    """The first key: a mapping's own span may cover the whole file."""
    return span_of(node.entries[0][0])
