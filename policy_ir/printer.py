"""`Policy` -> canonical text; `parse(print_policy(p)) == p` for every policy.

Fields at their default are left out, and a struct with one thing to say is written short.  Comments belong to
`format`, which keeps them.
"""

from __future__ import annotations

from typing import Any, assert_never

from msgspec import Struct

from kvir.policy_ir.base import IndexRange
from kvir.policy_ir.doc import Doc, Entries, Items, Leaf, Notes, layout, one_line, quoted
from kvir.policy_ir.nodes import Policy, Rule, Windows
from kvir.policy_ir.shape import (
    Choice,
    Field,
    Flag,
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
    plain_default,
)

# these are easier to read, and to compare by line, one below the other
APART = {(Policy, "rules"), (Policy, "windows"), (Windows, "table")}
BARE = {Rule}  # `- keep: all` needs no braces


def print_policy(policy: Policy) -> str:
    """The canonical text, ending with a line break."""
    return layout(_record(policy))


def print_term(value: Struct) -> str:
    """One node as a single line, e.g. `{recent: 1024}`, for messages and tables."""
    if isinstance(value, IndexRange):
        return range_text(value)
    return one_line(_tagged(value) if form(type(value)).tag else _record(value))


def value_text(value: Any, shape: Shape) -> str:
    """A value of any shape as a single line."""
    return one_line(_doc(value, shape))


def range_text(value: IndexRange) -> str:
    return str(value.first) if value.first == value.last else f"{value.first}..{value.last}"


def _doc(value: Any, shape: Shape) -> Doc:
    match shape:
        case Whole():
            return Leaf(str(value))
        case Real():
            return Leaf(repr(float(value)))
        case Text() | Choice():
            return Leaf(quoted(value))
        case Flag():
            return Leaf("true" if value else "false")
        case Range():
            return Leaf(range_text(value))
        case WordOr(word=word, item=item):
            return Leaf(word) if value is None else _doc(value, item)
        case Many(item=item, lone=lone):
            docs = [_doc(part, item) for part in value]
            return docs[0] if lone and len(docs) == 1 else Items([(doc, Notes()) for doc in docs])
        case Record():
            return _record(value)
        case OneOf():
            return _tagged(value)
        case _:
            assert_never(shape)


def _record(value: Struct) -> Entries:
    cls = type(value)
    entries: list[tuple[str, Doc, Notes]] = []
    for field in form(cls).fields.values():
        part = getattr(value, field.name)
        if plain_default(field, part):
            continue
        key, doc = _inline(part) if field.inline else (field.name, _doc(part, field.shape))
        if (cls, field.name) in APART and isinstance(doc, Items | Entries):
            doc.apart = True
        entries.append((key, doc, Notes()))
    return Entries(entries, bare=cls in BARE)


def _tagged(value: Struct) -> Doc:
    key, doc = _inline(value)
    return Leaf(key) if isinstance(doc, Entries) and not doc.entries else Entries([(key, doc, Notes())])


def _inline(value: Struct) -> tuple[str, Doc]:
    """The tag, and what follows it: the value of the only required field if that is all, else the fields."""
    struct = form(type(value))
    record = _record(value)
    if may_be_short(struct.short_field, record):
        return str(struct.tag), record.entries[0][1]
    return str(struct.tag), record


def may_be_short(field: Field | None, record: Entries) -> bool:
    """Whether the value of that field may stand for all fields: it is alone, and no mapping."""
    if field is None or len(record.entries) != 1 or record.entries[0][0] != field.name:
        return False
    return not isinstance(record.entries[0][1], Entries)
