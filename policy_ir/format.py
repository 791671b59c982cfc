"""Text -> the same text in canonical layout, with its comments (`kvir fmt`).

Unlike the printer it works on what is written: presets stay presets, and a default that is written out stays.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from typing import NamedTuple, assert_never

from kvir.policy_ir.diagnostic import PolicyError
from kvir.policy_ir.doc import Doc, Entries, Items, Leaf, Notes, layout, quoted
from kvir.policy_ir.nodes import Policy
from kvir.policy_ir.parse import read
from kvir.policy_ir.printer import APART, BARE, may_be_short
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
from kvir.policy_ir.source import Broken, Mapping, Scalar, Sequence, Source, Tree

_HASH = re.compile(r"(?:(?<=\s)|^)#[^\r\n]*", re.MULTILINE)


def format_text(text: str | bytes, name: str = "<text>") -> str:
    """The canonical layout of a policy text.

    Formatting twice changes nothing, and the policy stays equal.

    Raises:
        PolicyError: the text is not a policy.
    """
    parsed = read(text, name)
    root = parsed.source.root
    if parsed.policy is None or not isinstance(root, Mapping):
        raise PolicyError(parsed.report)
    notes = _Notes(parsed.source, root)
    return layout(_Builder(notes).record(root, form(Policy)), notes.header, notes.footer)


class _Builder:
    """Tree -> document, led by the shapes; the tree is known to fit them."""

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes

    def record(self, node: Mapping, struct: Form) -> Entries:
        order = {key: i for i, key in enumerate(struct.keys)}
        if struct.sugar is not None:
            order[struct.sugar.name] = order["keep"]
        entries: list[tuple[str, Doc, Notes]] = []
        for key, value in sorted(node.entries, key=lambda e: order[_text(e[0])]):
            name = _text(key)
            field = struct.field(name)
            assert field is not None
            if field.inline:
                assert isinstance(field.shape, OneOf)
                doc = self._payload(value, form(field.shape.by_tag[name]))
            else:
                doc = self._doc(value, field.shape)
            if (struct.cls, name) in APART and isinstance(doc, Items | Entries):
                doc.apart = True
            entries.append((name, doc, self._notes.of(value)))
        return Entries(entries, bare=struct.cls in BARE)

    def _doc(self, node: Tree, shape: Shape) -> Doc:
        match shape:
            case Whole():
                return Leaf(str(int(_text(node))))
            case Real():
                return Leaf(repr(float(_text(node))))
            case Text() | Choice():
                return Leaf(quoted(_text(node)))
            case Flag():
                return Leaf(_text(node))
            case Range():
                first, _, last = _text(node).partition("..")
                return Leaf(first if last in ("", first) else f"{first}..{last}")
            case WordOr(word=word, item=item):
                is_word = isinstance(node, Scalar) and node.text == word
                return Leaf(word) if is_word else self._doc(node, item)
            case Many(item=item, lone=lone):
                if not isinstance(node, Sequence):
                    return self._doc(node, item)
                parts = [(self._doc(part, item), self._notes.of(part)) for part in node.items]
                if lone and len(parts) == 1 and parts[0][1] == Notes():
                    return parts[0][0]
                return Items(parts)
            case Record(cls=cls):
                assert isinstance(node, Mapping)
                return self.record(node, form(cls))
            case OneOf(by_tag=by_tag):
                return self._tagged(node, by_tag)
            case _:
                assert_never(shape)

    def _tagged(self, node: Tree, by_tag: dict[str, type]) -> Doc:
        if not isinstance(node, Mapping):
            return Leaf(_text(node))
        ((key, value),) = node.entries
        doc = self._payload(value, form(by_tag[_text(key)]))
        notes = self._notes.of(value)
        if isinstance(doc, Entries) and not doc.entries and notes == Notes():
            return Leaf(_text(key))
        return Entries([(_text(key), doc, notes)])

    def _payload(self, node: Tree, struct: Form) -> Doc:
        if isinstance(node, Mapping):
            record = self.record(node, struct)
            if may_be_short(struct.short_field, record) and record.entries[0][2] == Notes():
                return record.entries[0][1]
            return record
        assert struct.short_field is not None
        return self._doc(node, struct.short_field.shape)


class _Part(NamedTuple):
    """An entry or an item; entries are known by their value's node."""

    start: int
    end: int
    node: Tree


class _Notes:
    """Which comment belongs to which entry or item.

    A comment after an entry or item on its line is at its end, or after its key if it goes on below; one on a
    line of its own is before what follows.
    """

    def __init__(self, source: Source, root: Mapping) -> None:
        self._source = source
        self._by_node: dict[Tree, Notes] = {}
        self.header: list[str] = []
        self.footer: list[str] = []
        self._parts: list[_Part] = []
        self._scalars: list[tuple[int, int]] = []
        self._collect(root)
        self._parts.sort(key=lambda part: (part.start, -part.end))
        self._scalars.sort()
        for found in _HASH.finditer(source.text):
            if not self._in_scalar(found.start()):
                self._attach(found.start(), found[0].rstrip())

    def of(self, node: Tree) -> Notes:
        return self._by_node.get(node, Notes())

    def _collect(self, node: Tree) -> None:
        match node:
            case Scalar():
                self._scalars.append((node.start, node.end))
            case Sequence():
                for item in node.items:
                    self._parts.append(_Part(item.start, item.end, item))
                    self._collect(item)
            case Mapping():
                for key, value in node.entries:
                    self._parts.append(_Part(key.start, max(key.end, value.end), value))
                    self._collect(key)
                    self._collect(value)
            case Broken():
                pass

    def _in_scalar(self, at: int) -> bool:
        i = bisect_right(self._scalars, (at, len(self._source.text)))
        return i > 0 and at < self._scalars[i - 1][1]

    def _attach(self, at: int, comment: str) -> None:
        column = self._source.position(at).column
        line_start = at - column + 1
        following = bisect_right(self._parts, at, key=lambda part: part.start)
        if self._source.text[line_start:at].strip(" \t"):
            begun = bisect_left(self._parts, line_start, key=lambda part: part.start)
            on_line = self._parts[begun:following]
            whole = next((part for part in on_line if part.end <= at), None)
            if whole is not None:
                self._notes(whole.node).end = comment
                return
            if on_line:
                self._notes(on_line[-1].node).head = comment
                return
        if following == 0:
            self.header.append(comment)
        elif following == len(self._parts):
            self.footer.append(comment)
        else:
            self._notes(self._parts[following].node).before.append(comment)

    def _notes(self, node: Tree) -> Notes:
        return self._by_node.setdefault(node, Notes())


def _text(node: Tree) -> str:
    assert isinstance(node, Scalar)
    return node.text
