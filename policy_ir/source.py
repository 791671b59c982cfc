"""A policy's text, the tree that was read from it, and where in the text each part of a policy stands.

The only place that knows line numbers.  Offsets count characters of `Source.text`; lines and columns start
at 1.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property

from msgspec import Struct


class Span(Struct, frozen=True, order=True):
    """Characters [start, end) of a text."""

    start: int
    end: int


class Position(Struct, frozen=True, order=True):
    """Line and column as editors show them."""

    line: int
    column: int


# ---- the tree ----------------------------------------------------------------------------------------------


class Scalar(Struct, eq=False, gc=False):
    """One value.  `plain` is False for quoted text and block scalars, which are never numbers."""

    start: int
    end: int
    text: str
    plain: bool = True


class Sequence(Struct, eq=False):
    start: int
    end: int
    items: list[Tree]


class Mapping(Struct, eq=False):
    """Entries in the order of the text; repeated keys are still there."""

    start: int
    end: int
    entries: list[tuple[Tree, Tree]]


class Broken(Struct, eq=False, gc=False):
    """Something that was reported when it was read; later stages pass over it in silence."""

    start: int
    end: int


Tree = Scalar | Sequence | Mapping | Broken


def span_of(node: Tree) -> Span:
    return Span(node.start, node.end)


def entry(mapping: Mapping, key: str) -> tuple[Tree, Tree] | None:
    """The first entry of that key."""
    for k, v in mapping.entries:
        if isinstance(k, Scalar) and k.text == key:
            return k, v
    return None


# ---- text and places ---------------------------------------------------------------------------------------

_BREAK = re.compile(r"\r\n|\n|\r")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")


class Source:
    """One text by name.

    `views` says how a tree node stands for a struct where the text is shorter than the struct: `{recent: 64}`
    is the node of a `Recent` whose field `tokens` is the node of `64`.
    """

    def __init__(self, name: str, text: str, root: Tree | None = None) -> None:
        self.name = name
        self.text = text
        self.root = root
        self.views: dict[Tree, dict[str | int, Tree]] = {}

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(m.end() for m in _BREAK.finditer(self.text))]

    def position(self, offset: int) -> Position:
        line = bisect_right(self._line_starts, offset)
        return Position(line, offset - self._line_starts[line - 1] + 1)

    def line(self, number: int) -> str:
        """The text of a line, without its break."""
        starts = self._line_starts
        end = starts[number] if number < len(starts) else len(self.text)
        return self.text[starts[number - 1] : end].rstrip("\r\n")

    def span(self, path: str) -> Span:
        """Where the value at `path` stands, e.g. `$.rules[3].heads[0]` in the field names of `nodes`.

        A part that the text leaves out (a default) has the span of the nearest part around it.
        """
        return self._walk(path)[1]

    def key_span(self, path: str) -> Span:
        """Where the key of the field at `path` stands; the value's span if it has no key of its own."""
        return self._walk(path)[0]

    def _walk(self, path: str) -> tuple[Span, Span]:
        if self.root is None:
            return Span(0, 0), Span(0, 0)
        node = self.root
        key = span_of(node)
        for name, index in _STEP.findall(path):
            step: str | int = name or int(index)
            child = self._child(node, step)
            if child is None:
                break
            key, node = child
        return key, span_of(node)

    def _child(self, node: Tree, step: str | int) -> tuple[Span, Tree] | None:
        view = self.views.get(node)
        if view is not None and step in view:
            return span_of(view[step]), view[step]
        match node:
            case Mapping() if isinstance(step, str):
                found = entry(node, step)
                return None if found is None else (span_of(found[0]), found[1])
            case Sequence() if isinstance(step, int) and step < len(node.items):
                return span_of(node.items[step]), node.items[step]
            case _:
                return None
