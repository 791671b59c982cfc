"""The language as data: every node of a policy file, frozen and closed.

Text is turned into these structs by `parse`, and back by `printer`; the Python builder makes the same
structs.  Nothing here knows a model or a device.  Counts are in tokens of one sequence; `recent` counts the
query's own token.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = ("prefill", "decode")

LANGUAGE_VERSION = 1
MAX_TOKENS = 1 << 30  # far beyond any context; keeps every later product inside 64 bits

Tokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
TokensOrFull = Annotated[Tokens | None, Meta(extra={"none": "full"})]  # None keeps all rows; text says `full`
Index = Annotated[int, Meta(ge=0, lt=1 << 16)]


class Node(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every node: immutable, hashable, unknown fields are errors."""


# ---- what a unit keeps -------------------------------------------------------------------------------------


class All(Node, frozen=True, tag="all"):
    """Every row: the unit behaves like stock attention."""


class Sink(Node, frozen=True, tag="sink"):
    """The first `tokens` rows of the sequence (StreamingLLM's attention sinks)."""

    tokens: Tokens


class Recent(Node, frozen=True, tag="recent"):
    """The last `tokens` rows, the query's own included: query q sees keys q - tokens + 1 .. q."""

    tokens: Tokens


Term = All | Sink | Recent


# ---- where a rule applies ----------------------------------------------------------------------------------


class IndexRange(Node, frozen=True, order=True):
    """`first..last`, both included, as written in the text; a single index has first == last."""

    first: Index
    last: Index


IndexSet = tuple[IndexRange, ...]


class Rule(Node, frozen=True):
    """What the selected units keep.  Later rules refine earlier ones; what no rule covers is `all`."""

    keep: tuple[Term, ...]
    layers: IndexSet | None = None  # None: every layer
    heads: IndexSet | None = None  # None: every KV head
    phase: Phase | None = None  # None: both phases


class Windows(Node, frozen=True):
    """A table of `recent` windows, one per (layer, KV head), as calibration writes them; None keeps all."""

    table: tuple[tuple[TokensOrFull, ...], ...]  # [layer][kv_head]
    sink: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0


# ---- the file ----------------------------------------------------------------------------------------------


class ModelPin(Node, frozen=True):
    """What a policy demands of the model it is bound to; each given field must match."""

    arch: str | None = None
    layers: Annotated[int, Meta(ge=1)] | None = None
    kv_heads: Annotated[int, Meta(ge=1)] | None = None
    fingerprint: str | None = None


class Provenance(Node, frozen=True):
    """How a calibrated file came to be.  A `model` fingerprint here binds the policy to that model."""

    tool: str
    version: str
    model: str | None = None  # fingerprint of the calibrated model
    data: str | None = None
    context: Annotated[int, Meta(ge=1)] | None = None
    samples: Annotated[int, Meta(ge=1)] | None = None
    threshold: float | None = None


class Policy(Node, frozen=True):
    """One policy file.  `windows`, if given, is read as the first and broadest rule."""

    kvir: Annotated[int, Meta(ge=1)]
    name: str
    model: ModelPin | None = None
    windows: Windows | None = None
    rules: tuple[Rule, ...] = ()
    provenance: Provenance | None = None


def encode(policy: Policy) -> bytes:
    """Canonical JSON of a policy: the bytes that fingerprints are taken of."""
    return msgspec.json.encode(policy, order="deterministic")
