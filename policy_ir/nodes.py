"""The language as data: a policy file, and by re-export every node in it.  All are frozen and closed.

Text is turned into these structs by `parse`, and back by `printer`; the Python builder makes the same
structs.  Nothing here knows a model or a device.  Counts are in tokens of one sequence; `recent` counts the
query's own token.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvir.policy_ir.base import (
    LANGUAGE_VERSION,
    MAX_TOKENS,
    PHASES,
    Index,
    IndexRange,
    IndexSet,
    Node,
    Phase,
    Tokens,
    TokensOrFull,
)
from kvir.policy_ir.budgets import Budget, Safeguard
from kvir.policy_ir.rules import Overflow, Region, Rule, Store, Trigger
from kvir.policy_ir.scores import Score
from kvir.policy_ir.terms import All, Recent, Sink, StaticTerm, Term, TopK, TopP

__all__ = [
    "LANGUAGE_VERSION",
    "MAX_TOKENS",
    "PHASES",
    "All",
    "Budget",
    "Index",
    "IndexRange",
    "IndexSet",
    "ModelPin",
    "Node",
    "Overflow",
    "Phase",
    "Policy",
    "Provenance",
    "Recent",
    "Region",
    "Rule",
    "Safeguard",
    "Score",
    "Sink",
    "StaticTerm",
    "Store",
    "Term",
    "Tokens",
    "TokensOrFull",
    "TopK",
    "TopP",
    "Trigger",
    "Windows",
    "encode",
]


class Windows(Node, frozen=True):
    """A table of `recent` windows, one per (layer, KV head), as calibration writes them; `full` keeps all."""

    table: tuple[tuple[TokensOrFull, ...], ...]  # a row per layer, a window per KV head
    sink: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] = 0


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
