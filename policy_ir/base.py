"""What every part of the language is made of: the base of all nodes, and numbers with their bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")

LANGUAGE_VERSION = 1
MAX_TOKENS = 1 << 30  # far beyond any context; keeps every later product inside 64 bits

# tokens of one sequence; Count where zero makes sense; None, `full` in the text, keeps all rows
Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
TokensOrFull = Annotated[Tokens | None, Meta(extra={"none": "full"})]
CountOrFull = Annotated[Count | None, Meta(extra={"none": "full"})]
Index = Annotated[int, Meta(ge=0, lt=1 << 16)]
Share = Annotated[float, Meta(gt=0, le=1)]
Weight = Annotated[float, Meta(ge=-1e6, le=1e6)]
NonNegative = Annotated[float, Meta(ge=0, le=1e6)]

# a union whose tag stands among the fields of its owner: `{tokens: 512, by: ...}`
INLINE: dict[str, Any] = {"inline": True}


class Node(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every node: immutable, hashable, unknown fields are errors."""


class IndexRange(Node, frozen=True, order=True):
    """`first..last`, both included, as written in the text; a single index has first == last."""

    first: Index
    last: Index


IndexSet = tuple[IndexRange, ...]
