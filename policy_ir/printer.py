"""`Policy` -> canonical text; `parse(print_policy(p)) == p` for every policy.

Fields at their default are left out, a struct with one thing to say is written short, and a part goes on one
line if it fits, else one line per field or item.  Comments belong to `format`, which keeps them.
"""

from __future__ import annotations

import json
import re
from typing import Any, assert_never

from msgspec import Struct

from kvir.policy_ir.nodes import IndexRange, Policy, Windows
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
    plain_default,
)

LINE_COLUMNS = 100

# these are easier to read, and to compare by line, one below the other
_ONE_PER_LINE = {(Policy, "rules"), (Policy, "windows"), (Windows, "table")}

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_+./-]*( [A-Za-z0-9_+(./-][A-Za-z0-9_+)./-]*)*")
_RESERVED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


def print_policy(policy: Policy) -> str:
    """The canonical text, ending with a line break."""
    return "".join(f"{line}\n" for line in _fields_block(policy))


def print_term(value: Struct) -> str:
    """One node as a single line, e.g. `{recent: 1024}`, for messages and tables."""
    return _flow(value, _shape_of(value))


# ---- on one line -------------------------------------------------------------------------------------------


def _flow(value: Any, shape: Shape) -> str:
    match shape:
        case Whole():
            return str(value)
        case Real():
            return repr(float(value))
        case Text():
            return _quoted(value)
        case Flag():
            return "true" if value else "false"
        case Choice():
            return _quoted(value)
        case Range():
            return _range(value)
        case WordOr(word=word, item=item):
            return word if value is None else _flow(value, item)
        case Many(item=item, lone=lone):
            if lone and len(value) == 1 and not (text := _flow(value[0], item)).startswith("{"):
                return text
            return f"[{', '.join(_flow(v, item) for v in value)}]"
        case Record():
            return _braces(_written(value))
        case OneOf():
            return _tagged(value)
        case _:
            assert_never(shape)


def _tagged(value: Struct) -> str:
    struct = form(type(value))
    written = _written(value)
    if not written:
        return str(struct.tag)
    if (short := _short(struct, written)) is not None:
        return f"{{{struct.tag}: {short}}}"
    return f"{{{struct.tag}: {_braces(written)}}}"


def _short(struct: Form, written: list[tuple[str, Any, Shape]]) -> str | None:
    """The value alone, if it may stand for the whole struct."""
    field = struct.short_field
    if field is None or [name for name, _, _ in written] != [field.name]:
        return None
    text = _flow(written[0][1], field.shape)
    return None if text.startswith("{") else text


def _braces(written: list[tuple[str, Any, Shape]]) -> str:
    return "{" + ", ".join(f"{name}: {_flow(value, shape)}" for name, value, shape in written) + "}"


def _written(value: Struct) -> list[tuple[str, Any, Shape]]:
    """The fields that must be written: (name, value, shape)."""
    fields = ((f, getattr(value, f.name)) for f in form(type(value)).fields.values())
    return [(f.name, v, f.shape) for f, v in fields if not plain_default(f, v)]


def _range(value: IndexRange) -> str:
    return str(value.first) if value.first == value.last else f"{value.first}..{value.last}"


def _quoted(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    return json.dumps(text, ensure_ascii=False)


def _shape_of(value: Struct) -> Shape:
    struct = form(type(value))
    if isinstance(value, IndexRange):
        return Range(value.last)
    return OneOf({struct.tag: struct.cls}) if struct.tag else Record(struct.cls)


# ---- on several lines --------------------------------------------------------------------------------------


def _fields_block(value: Struct) -> list[str]:
    """One field a line; a field that does not fit goes on in the lines below, indented."""
    lines: list[str] = []
    for name, part, shape in _written(value):
        apart = (type(value), name) in _ONE_PER_LINE and part != ()
        text = _flow(part, shape)
        if not apart and len(name) + 2 + len(text) <= LINE_COLUMNS - 4:
            lines.append(f"{name}: {text}")
            continue
        below = _block(part, shape)
        lines += [f"{name}: {text}"] if below is None else [f"{name}:", *(f"  {line}" for line in below)]
    return lines


def _block(value: Any, shape: Shape) -> list[str] | None:
    """The same on several lines; None for what has no such form."""
    match shape:
        case Many(item=item):
            parts: tuple[Any, ...] = value
            return [line for part in parts for line in _item(part, item)]
        case Record():
            return _fields_block(value)
        case OneOf():
            node: Struct = value
            struct = form(type(node))
            written = _written(node)
            if not written or _short(struct, written) is not None:
                return None
            return [f"{struct.tag}:", *(f"  {line}" for line in _fields_block(node))]
        case Whole() | Real() | Text() | Flag() | Choice() | Range() | WordOr():
            return None
        case _:
            assert_never(shape)


def _item(value: Any, shape: Shape) -> list[str]:
    """One `- ` item of a list."""
    text = _flow(value, shape)
    if isinstance(shape, Record) and len(written := _written(value)) == 1:
        text = text[1:-1] if written else text  # `- keep: all` needs no braces
    if len(text) <= LINE_COLUMNS - 8 or isinstance(shape, Many):  # a row of a table stays one line
        return [f"- {text}"]
    below = _block(value, shape)
    if below is None:
        return [f"- {text}"]
    return [f"- {below[0]}", *(f"  {line}" for line in below[1:])]
