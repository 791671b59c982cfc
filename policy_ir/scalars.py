"""Single values: a scalar of the text against the shape that it must have.

Each function returns the value, or reports and returns `BROKEN`.
"""

from __future__ import annotations

import math
import re
from typing import Any

from kvir.policy_ir import describe
from kvir.policy_ir.base import IndexRange
from kvir.policy_ir.diagnostic import Report
from kvir.policy_ir.shape import Choice, Flag, Range, Real, Shape, Text, Whole
from kvir.policy_ir.source import Scalar, Tree, span_of

MAX_TEXT_LENGTH = 1000
MAX_DIGITS = 18

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_NUMBER = re.compile(r"[-+]?(?=\.?[0-9])(0|[1-9][0-9]*)?(\.[0-9]+|(?<=[0-9])\.)?([eE][-+]?[0-9]+)?")
_LIKE_NUMBER = re.compile(r"[-+]?\.?[0-9]|[-+]?\.(inf|nan)", re.IGNORECASE)
_RANGE = re.compile(r"([0-9]{1,18})(?:\.\.([0-9]{1,18}))?")
_NOTHING = ("", "~", "null", "Null", "NULL")


class BrokenValue:
    """The type of `BROKEN`."""


BROKEN = BrokenValue()  # stands for a value that was reported; what holds it is broken too, and silent


def wrong(node: Tree, shape: Shape, report: Report) -> BrokenValue:
    """A value of the wrong kind."""
    message = f"expected {describe.expected(shape)}, found {describe.found(node)}"
    report.error("KV022", message, span_of(node), help=describe.conversion(node, shape))
    return BROKEN


def whole(node: Tree, shape: Whole, report: Report) -> Any:
    if not isinstance(node, Scalar) or not looks_numeric(node):
        return wrong(node, shape, report)
    if not _INTEGER.fullmatch(node.text):
        return _malformed(node, "a whole number", report)
    if len(node.text) > MAX_DIGITS:
        return _out_of_range(node, shape, report)
    value = int(node.text)
    if (shape.low is not None and value < shape.low) or (shape.high is not None and value > shape.high):
        return _out_of_range(node, shape, report)
    return value


def real(node: Tree, shape: Real, report: Report) -> Any:
    if not isinstance(node, Scalar) or not looks_numeric(node):
        return wrong(node, shape, report)
    if not _NUMBER.fullmatch(node.text):
        return _malformed(node, "a number", report)
    value = float(node.text)
    inside = (
        math.isfinite(value)
        and (shape.low is None or value >= shape.low)
        and (shape.high is None or value <= shape.high)
        and (shape.above is None or value > shape.above)
        and (shape.below is None or value < shape.below)
    )
    return value if inside else _out_of_range(node, shape, report)


def text(node: Tree, shape: Text, report: Report) -> Any:
    if not isinstance(node, Scalar) or (node.plain and not is_text(node.text)):
        return wrong(node, shape, report)
    limit = shape.max_length or MAX_TEXT_LENGTH
    if not shape.min_length <= len(node.text) <= limit:
        least = f"{shape.min_length} to " if shape.min_length else "at most "
        message = f"the text has {len(node.text)} characters"
        report.error("KV030", message, span_of(node), help=f"write {least}{limit} characters")
        return BROKEN
    if not node.text.isprintable():
        message = "the text holds a line break or a character that cannot be printed"
        report.error("KV030", message, span_of(node), help="write printable text on one line")
        return BROKEN
    return node.text


def flag(node: Tree, shape: Flag, report: Report) -> Any:
    if isinstance(node, Scalar) and node.plain and node.text in ("true", "false"):
        return node.text == "true"
    return wrong(node, shape, report)


def choice(node: Tree, shape: Choice, report: Report) -> Any:
    if not isinstance(node, Scalar):
        return wrong(node, shape, report)
    if node.text in shape.words:
        return node.text
    message = f"{describe.quote(node.text)} is not one of the choices"
    report.error("KV026", message, span_of(node), help=describe.choose(node.text, shape.words))
    return BROKEN


def index_range(node: Tree, shape: Range, report: Report) -> tuple[Any, dict[str | int, Tree]]:
    """The value, and where its two ends stand."""
    if not isinstance(node, Scalar):
        return wrong(node, shape, report), {}
    found = _RANGE.fullmatch(node.text)
    if found is None:
        message = f"{describe.quote(node.text)} is not an index range"
        report.error("KV027", message, span_of(node), help=describe.range_help(node.text))
        return BROKEN, {}
    # quoted text begins one character further in
    at = node.start + (0 if node.plain else 1)
    group = 2 if found[2] else 1
    first = Scalar(at, at + found.end(1), found[1])
    last = Scalar(at + found.start(group), at + found.end(group), found[group])
    ends = [whole(end, Whole(0, shape.high), report) for end in (first, last)]
    value = BROKEN if BROKEN in ends else IndexRange(first=ends[0], last=ends[1])
    return value, {"first": first, "last": last}


# ---- kinds of plain text -----------------------------------------------------------------------------------


def is_nothing(node: Tree) -> bool:
    return isinstance(node, Scalar) and node.plain and node.text in _NOTHING


def looks_numeric(node: Scalar) -> bool:
    return node.plain and _LIKE_NUMBER.match(node.text) is not None


def is_text(plain: str) -> bool:
    """Whether YAML reads an unquoted scalar as text, not as a number, a truth value or nothing."""
    is_number = _NUMBER.fullmatch(plain) is not None
    return plain not in (*_NOTHING, "true", "false") and not is_number


def _out_of_range(node: Scalar, shape: Whole | Real, report: Report) -> BrokenValue:
    message = f"{describe.quote(node.text)} is out of range"
    report.error("KV023", message, span_of(node), help=f"write {describe.expected(shape)}")
    return BROKEN


def _malformed(node: Scalar, what: str, report: Report) -> BrokenValue:
    message = f"{describe.quote(node.text)} is not {what}"
    report.error("KV031", message, span_of(node), help=describe.number_help(node.text, what))
    return BROKEN
