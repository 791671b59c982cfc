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

from kvir.policy_ir.nodes import Policy

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


# ---- stages ------------------------------------------------------------------------------------------------


class VerifiedPolicy(Stage, frozen=True, kw_only=True):
    """A policy whose rules make sense by themselves."""

    policy: Policy


class Retention(Stage, frozen=True, kw_only=True):
    """A static retention: rows [0, sink_tokens) and the last `recent_tokens`; None keeps every row."""

    sink_tokens: int
    recent_tokens: int | None


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


class ResidencyClass(Stage, frozen=True, kw_only=True):
    """Units whose head-pages live and die together.

    Windows that differ by less than a page share a class; the exact bound is in `Retention`.  `sink_pages`
    and `window_pages` are the span during prefill, and during decode too unless `decode` says that less is
    enough then.
    """

    sink_pages: int
    window_pages: int | None  # None: every page stays
    units: tuple[int, ...]
    decode: PageSpan | None = None  # None: as in prefill

    @property
    def prefill(self) -> PageSpan:
        return PageSpan(sink_pages=self.sink_pages, window_pages=self.window_pages)


class LayoutPlan(Stage, frozen=True, kw_only=True):
    """Where rows live, and what it costs, exactly."""

    budgeted: BudgetedPolicy
    page_tokens: int
    kv_heads: int  # per attention layer, the same for all
    query_heads: int
    head_dim: int
    dtype: Dtype
    unit_count: int
    classes: tuple[ResidencyClass, ...]  # the class of full units, if any, first
    head_page_bytes: int  # K and V of `page_tokens` rows of one unit
    table_bytes_per_page: int  # the residency table's cost of one logical page
    logical_ratio: int  # logical tokens per full-KV token of the pool


class KernelChoice(Stage, frozen=True, kw_only=True):
    """The implementation of one op, and why the others were not taken."""

    op: str
    implementation: str
    rejected: tuple[tuple[str, str], ...] = ()  # (implementation, reason)


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
