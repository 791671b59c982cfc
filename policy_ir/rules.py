"""Where, when and how: rules, triggers, and what becomes of rows that do not stay."""

from __future__ import annotations

from typing import Literal

from kvir.policy_ir.base import Count, IndexSet, Node, Phase, Tokens
from kvir.policy_ir.terms import Term

# ---- when a selection runs ---------------------------------------------------------------------------------


class TriggerBase(Node, frozen=True):
    """Base of every trigger."""


class PrefillChunk(TriggerBase, frozen=True, tag="prefill_chunk"):
    """After every chunk of the prompt: the server's chunks, or blocks of `tokens`."""

    tokens: Tokens | None = None


class PrefillEnd(TriggerBase, frozen=True, tag="prefill_end"):
    """Once, after the last chunk of the prompt, if the prompt is longer than `over`."""

    over: Count = 0


class Every(TriggerBase, frozen=True, tag="every"):
    """After each `tokens` generated tokens of the sequence."""

    tokens: Tokens


class Over(TriggerBase, frozen=True, tag="over"):
    """When a unit holds more than `tokens` rows."""

    tokens: Tokens


Trigger = PrefillChunk | PrefillEnd | Every | Over


# ---- what becomes of the rest ------------------------------------------------------------------------------


class OverflowBase(Node, frozen=True):
    """Base of every overflow."""


class Evict(OverflowBase, frozen=True, tag="evict"):
    """Rows that do not stay are gone."""


class Merge(OverflowBase, frozen=True, tag="merge"):
    """Rows that do not stay are averaged into rows that do, and the attention that they had is kept.

    How much a row counts is its share of the attention of the last `queries` queries, the reference.
    `into: pairwise` spreads them over as many of the rows that stay, those of least attention, both in the
    order of positions; `one` joins all with the one of least attention; `neighbour` each with the next row
    that stays.  Rows that `sink` and `recent` keep take nothing in.  `weights: equal` averages without regard
    to attention.  Averaged keys blur their positions, so keys may stay as they are.

    By Jensen's inequality a merged row has less attention than the rows that it stands for.  `bias: lse`
    adds a bias to its logit, so that the attention that the reference queries give it is the sum of theirs:
    for one reference query, the log-sum-exp and the output are what they were.  The published code has none.
    """

    into: Literal["pairwise", "one", "neighbour"] = "pairwise"
    keys: Literal["average", "keep"] = "average"
    weights: Literal["attention", "equal"] = "attention"
    bias: Literal["lse", "none"] = "lse"
    queries: Tokens = 32


Overflow = Evict | Merge

Region = Literal["prompt", "generated", "all"]
Store = Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"]


class Rule(Node, frozen=True):
    """What the selected units keep.  Later rules refine earlier ones; what no rule covers is `all`."""

    keep: tuple[Term, ...]  # the unit keeps the rows of all terms together
    layers: IndexSet | None = None  # left out: every layer
    heads: IndexSet | None = None  # left out: every KV head
    phase: Phase | None = None  # left out: both phases
    trigger: tuple[Trigger, ...] = ()  # left out: `prefill_end` if a term needs scores
    overflow: Overflow = Evict()
    region: Region = "all"  # the rows that may go
    store: Store = "auto"  # how kept rows are stored; auto: as the model computes them
    # original: rows keep the rotation of their place in the text; cache: that of their place in the cache
    positions: Literal["original", "cache"] = "original"
