"""One frozen type per stage of lowering.

    Policy -> VerifiedPolicy -> BoundPolicy -> BudgetedPolicy
           -> LayoutPlan -> KernelPlan -> GraphBuckets -> ExecutionPlan

A pass receives only a finished stage and returns the next.  No field is filled in later by somebody else.

Words: a *unit* is one (attention layer, KV head) pair of this model; units are numbered
`layer_index * kv_heads + head` where `layer_index` counts attention layers only.  A *head-page* is
`page_tokens` rows of one unit.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from kvir.policy_ir.budgets import Rounding
from kvir.policy_ir.nodes import Policy, Region, Safeguard, Trigger

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class Stage(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every stage type."""


# ---- model -------------------------------------------------------------------------------------------------


class AttentionLayer(Stage, frozen=True, kw_only=True):
    """One layer that has a KV cache."""

    layer_id: int  # index in the model, counting every layer
    query_heads: int
    kv_heads: int
    head_dim: int
    native_window_tokens: int | None = None  # the model's own window, own token included; None: global


class ModelFacts(Stage, frozen=True, kw_only=True):
    """What lowering needs of a model's `config.json`."""

    arch: str  # `model_type` of the config, e.g. "llama"
    architecture: str  # class name in the config, e.g. "LlamaForCausalLM"
    layers: tuple[AttentionLayer, ...]
    layer_count: int  # every layer, attention or not
    context_tokens: int
    dtype: Dtype
    fingerprint: str  # sha256 over the facts that fix the meaning of a policy
    needs: tuple[str, ...] = ()  # what attention needs beyond a causal softmax; see kernels/catalog.py


# ---- how many rows a score keeps ---------------------------------------------------------------------------


class RowsAmount(Stage, frozen=True, kw_only=True, tag="rows"):
    """The same at every length."""

    rows: int


class ShareAmount(Stage, frozen=True, kw_only=True, tag="share"):
    """A share of the sequence when the selection runs, or of its prompt; exact decimal arithmetic."""

    share: float
    of: Literal["sequence", "prompt"]
    rounding: Rounding


class TotalAmount(Stage, frozen=True, kw_only=True, tag="total"):
    """Rows of all units together that compete."""

    rows: int


class RampAmount(Stage, frozen=True, kw_only=True, omit_defaults=True, tag="ramp"):
    """The figure of layer `index` of `count` on a line whose mean is `mean` (`policy_ir.budgets.Ramp`)."""

    mean: int
    ratio: int
    arithmetic: Literal["integer", "real"]
    index: int
    count: int
    rounding: Rounding = "down"
    line: Literal["selected", "kept"] = "selected"


class MassAmount(Stage, frozen=True, kw_only=True, tag="mass"):
    """As many as hold a share of a distribution: known when the scores are."""

    mass: float


class OpenAmount(Stage, frozen=True, kw_only=True, tag="open"):
    """As many as attention gives the unit's layer, within the bounds of one unit."""


Amount = RowsAmount | ShareAmount | TotalAmount | RampAmount | MassAmount | OpenAmount


class Quota(Stage, frozen=True, kw_only=True, omit_defaults=True):
    """How many rows one term by score keeps in one unit; `quota.py` does the arithmetic.

    `amount` is per unit, or on average over the `group` units that compete for rows over `scope`.  `inside`
    rows of the other terms count as part of it.  `floor`, `cap` and `safeguard` bound one unit.
    """

    by: str  # tag of the score that ranks the rows
    amount: Amount
    of: str | None = None  # tag of the score whose mass is meant, if another
    inside: int = 0
    scope: Literal["head", "layer", "model"] = "head"
    group: int = 1
    floor: int = 0
    cap: int | None = None
    safeguard: Safeguard | None = None
    block: int = 1
    tied: int = 1  # rivals that keep as many rows as this unit, itself included
    step: int = 1  # rows that rivals take at once: a block of each unit in the largest tie


class Selection(Stage, frozen=True, kw_only=True, omit_defaults=True):
    """What one phase does to a unit when a trigger fires: rows outside the terms of rule `rule` go.

    Until then, and between triggers, every row stays.
    """

    rule: int  # index in `policy.rules`, which has the scores in full
    triggers: tuple[Trigger, ...]  # those of the phase
    quotas: tuple[Quota, ...]  # one per term by score, in the order of the rule
    sink_tokens: int = 0
    recent_tokens: int = 0
    region: Region = "all"  # the rows that may go


# ---- stages ------------------------------------------------------------------------------------------------


class VerifiedPolicy(Stage, frozen=True, kw_only=True):
    """A policy whose rules make sense by themselves."""

    policy: Policy


class Retention(Stage, frozen=True, kw_only=True, omit_defaults=True):
    """What a unit keeps in one phase.

    By position: rows [0, sink_tokens) and the last `recent_tokens`; None keeps every row.  A unit with a
    `selection` keeps every row by position, and loses rows when its triggers fire.
    """

    sink_tokens: int
    recent_tokens: int | None
    selection: Selection | None = None


class BoundPolicy(Stage, frozen=True, kw_only=True):
    """A policy read against one model: which rule (index in `policy.rules`, -1 the windows table, -2 nothing)
    governs each unit, per phase."""

    verified: VerifiedPolicy
    model: ModelFacts
    prefill_rule: tuple[tuple[int, ...], ...]  # [layer_index][kv_head]
    decode_rule: tuple[tuple[int, ...], ...]


class BudgetedPolicy(Stage, frozen=True, kw_only=True):
    """One retention per unit and phase, native sliding windows already intersected."""

    bound: BoundPolicy
    prefill: tuple[tuple[Retention, ...], ...]  # [layer_index][kv_head]
    decode: tuple[tuple[Retention, ...], ...]


class PageSpan(Stage, frozen=True, kw_only=True):
    """The pages a unit holds at length n: [0, sink_pages) and [n // P - window_pages, ceil(n / P)), clipped
    to what exists.  For a window of w tokens, `window_pages` = ceil((w - 1) / P): the window lags to the page
    floor, so that a page-aligned prefix match of n finds a whole window."""

    sink_pages: int
    window_pages: int | None  # None: every page stays


class ResidencyClass(Stage, frozen=True, kw_only=True, omit_defaults=True):
    """Units whose head-pages live and die together.

    Windows that differ by less than a page share a class; the exact bound is in `Retention`.  `sink_pages`
    and `window_pages` are the span during prefill, and during decode too unless `decode` says that less is
    enough then.  Units that select at the same moments lose their pages at the same moments.
    """

    sink_pages: int
    window_pages: int | None  # None: every page stays
    units: tuple[int, ...]
    decode: PageSpan | None  # None: as in prefill
    selects: tuple[Trigger, ...] = ()  # when rows move to compact pages, in either phase

    @property
    def prefill(self) -> PageSpan:
        return PageSpan(sink_pages=self.sink_pages, window_pages=self.window_pages)


class CompactClass(Stage, frozen=True, kw_only=True):
    """Units that select alike.  Their rows by position follow their residency class; what a selection leaves
    lies in compact head-pages of the request, as many as `course.py` says."""

    prefill: Retention
    decode: Retention
    prefill_span: PageSpan
    decode_span: PageSpan
    units: tuple[int, ...]


class LayoutPlan(Stage, frozen=True, kw_only=True, omit_defaults=True):
    """Where rows live, and what it costs: exactly, but for selections whose counts the scores decide."""

    budgeted: BudgetedPolicy
    page_tokens: int
    kv_heads: int  # per attention layer, the same for all
    query_heads: int
    head_dim: int
    dtype: Dtype
    unit_count: int
    classes: tuple[ResidencyClass, ...]  # the class of full units, if any, first
    head_page_bytes: int  # K and V of `page_tokens` rows of one unit, and biases where rows are merged
    table_bytes_per_page: int  # the residency table's cost of one logical page
    logical_ratio: int  # logical tokens per full-KV token of the pool
    compact: tuple[CompactClass, ...] = ()  # a partition of the units that select by score


class KernelTile(Stage, frozen=True, kw_only=True):
    """How a Triton kernel is cut (`kernels.catalog.Tile`)."""

    rows: int  # of K and V at a time
    queries: int  # (token, query head) pairs of a block, padded
    warps: int
    stages: int  # of the pipeline of loads
    blocks: int  # that a multiprocessor holds at once


class KernelChoice(Stage, frozen=True, kw_only=True, omit_defaults=True):
    """The implementation of one op in some layers, and why the others were not taken."""

    op: str
    implementation: str
    rejected: tuple[tuple[str, str], ...]  # (implementation, reason)
    layers: tuple[int, ...] | None = None  # layer ids; None: every layer with a KV cache
    tile: KernelTile | None = None
    built: bool = True  # false: data for the planner; this version of kvir has no such kernel


class KernelPlan(Stage, frozen=True, kw_only=True):
    layout: LayoutPlan
    device: str
    choices: tuple[KernelChoice, ...]


class GraphBucket(Stage, frozen=True, kw_only=True):
    batch: int
    splits: int  # parts that each sequence is cut into, reduced at the end
    static_bytes: int


class GraphBuckets(Stage, frozen=True, kw_only=True):
    kernels: KernelPlan
    decode: tuple[GraphBucket, ...]  # empty where the device has no graphs


class ExecutionPlan(Stage, frozen=True, kw_only=True):
    """What the server executes.  Saved as JSON; data only."""

    format: Annotated[int, Meta(ge=1)]
    kvir_version: str
    fingerprint: str  # of policy, model and layout: part of the prefix-cache key
    buckets: GraphBuckets

    @property
    def layout(self) -> LayoutPlan:
        return self.buckets.kernels.layout

    @property
    def budgeted(self) -> BudgetedPolicy:
        return self.layout.budgeted

    @property
    def model(self) -> ModelFacts:
        return self.budgeted.bound.model

    @property
    def policy(self) -> Policy:
        return self.budgeted.bound.verified.policy

    @property
    def choices(self) -> tuple[KernelChoice, ...]:
        return self.buckets.kernels.choices
