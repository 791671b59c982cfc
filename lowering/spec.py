"""What is true of every finished stage.  Checked after each pass, and of every stage of a plan file that is
loaded.

A user's mistake is a diagnostic of a pass; a broken spec is a mistake of kvir, or of whoever edited a plan
file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from kvir import __version__
from kvir.lowering.budget import retentions, within
from kvir.lowering.device_facts import DEVICES
from kvir.lowering.graph_buckets import decode_buckets
from kvir.lowering.kernel_plan import kernel_choices
from kvir.lowering.layout import (
    MAX_PAGE_TOKENS,
    TABLE_ENTRY_BYTES,
    biased,
    compact_classes,
    head_page_bytes,
    logical_ratio,
    residency_classes,
)
from kvir.lowering.model_facts import facts_errors
from kvir.lowering.plan_fingerprint import PLAN_FORMAT, plan_fingerprint
from kvir.lowering.resolve import bound_errors, governing
from kvir.lowering.stages import (
    BoundPolicy,
    BudgetedPolicy,
    ExecutionPlan,
    GraphBuckets,
    KernelPlan,
    LayoutPlan,
    VerifiedPolicy,
)
from kvir.lowering.verify import MAX_RULES, verified_errors
from kvir.policy_ir.nodes import PHASES

AnyStage = (
    VerifiedPolicy | BoundPolicy | BudgetedPolicy | LayoutPlan | KernelPlan | GraphBuckets | ExecutionPlan
)


def broken(stage: AnyStage) -> list[str]:
    """The rules that `stage` breaks; empty if it is sound.  Stages inside it are taken as checked."""
    match stage:
        case VerifiedPolicy():
            return list(_verified(stage))
        case BoundPolicy():
            return list(_bound(stage))
        case BudgetedPolicy():
            return list(_budgeted(stage))
        case LayoutPlan():
            return list(_layout(stage))
        case KernelPlan():
            return list(_kernels(stage))
        case GraphBuckets():
            return list(_buckets(stage))
        case ExecutionPlan():
            return list(_plan(stage))
        case _:
            assert_never(stage)


def every_stage(stage: AnyStage) -> tuple[AnyStage, ...]:
    """All stages inside a stage and itself, in the order of lowering."""
    match stage:
        case VerifiedPolicy():
            return (stage,)
        case BoundPolicy():
            return (*every_stage(stage.verified), stage)
        case BudgetedPolicy():
            return (*every_stage(stage.bound), stage)
        case LayoutPlan():
            return (*every_stage(stage.budgeted), stage)
        case KernelPlan():
            return (*every_stage(stage.layout), stage)
        case GraphBuckets():
            return (*every_stage(stage.kernels), stage)
        case ExecutionPlan():
            return (*every_stage(stage.buckets), stage)
        case _:
            assert_never(stage)


def _verified(stage: VerifiedPolicy) -> Iterator[str]:
    if len(stage.policy.rules) > MAX_RULES:
        yield f"more than {MAX_RULES} rules"
    else:
        yield from verified_errors(stage.policy)


def _bound(stage: BoundPolicy) -> Iterator[str]:
    yield from facts_errors(stage.model)
    yield from bound_errors(stage.verified, stage.model)
    policy = stage.verified.policy
    for phase, table in zip(PHASES, (stage.prefill_rule, stage.decode_rule), strict=True):
        if table != governing(policy, stage.model, phase):
            yield f"the rules of {phase} are not the last ones that cover each unit"


def _budgeted(stage: BudgetedPolicy) -> Iterator[str]:
    bound = stage.bound
    for phase, have in zip(PHASES, (stage.prefill, stage.decode), strict=True):
        if have != retentions(bound, phase):
            yield f"retentions of {phase} are not what the governing rules ask for"
    for before, after in zip(stage.prefill, stage.decode, strict=True):
        if not all(within(a, b) for a, b in zip(after, before, strict=True)):
            yield "decode keeps rows that prefill dropped"
            return


def _layout(stage: LayoutPlan) -> Iterator[str]:
    model = stage.budgeted.bound.model
    shapes = {(x.kv_heads, x.query_heads, x.head_dim) for x in model.layers}
    if shapes != {(stage.kv_heads, stage.query_heads, stage.head_dim)}:
        yield "heads or head size are not the model's"
    if stage.unit_count != len(model.layers) * stage.kv_heads:
        yield "unit_count is not layers x KV heads"
    if not 2 <= stage.page_tokens <= MAX_PAGE_TOKENS or stage.page_tokens & (stage.page_tokens - 1):
        yield "page_tokens out of range"
        return
    if stage.classes != residency_classes(stage.budgeted, stage.page_tokens):
        yield "classes do not group the units by the pages they hold"
    if sorted(u for c in stage.classes for u in c.units) != list(range(stage.unit_count)):
        yield "classes are not a partition of the units"
    each = head_page_bytes(stage.page_tokens, stage.head_dim, stage.dtype, biased=biased(stage.budgeted))
    if stage.head_page_bytes != each:
        yield "head_page_bytes is not K, V and biases of one head-page"
    if stage.table_bytes_per_page != TABLE_ENTRY_BYTES * stage.unit_count:
        yield "table_bytes_per_page is not one entry per unit"
    if stage.logical_ratio != logical_ratio(stage.classes, stage.unit_count):
        yield "logical_ratio does not follow from the full units"
    if any(rule.store not in ("auto", stage.dtype) for rule in stage.budgeted.bound.verified.policy.rules):
        yield "a rule stores rows in another dtype than the cache's"
    if stage.compact != compact_classes(stage.budgeted, stage.page_tokens):
        yield "compact classes do not group the units that select"


def _kernels(stage: KernelPlan) -> Iterator[str]:
    if stage.device not in DEVICES:
        yield f"unknown device `{stage.device}`"
        return
    if stage.choices != kernel_choices(stage.layout, stage.device):
        yield "choices do not follow from the kernel catalogue"
    if not all(c.implementation for c in stage.choices):
        yield "an op has no implementation"


def _buckets(stage: GraphBuckets) -> Iterator[str]:
    if stage.decode != decode_buckets(
        stage.kernels.layout, DEVICES[stage.kernels.device], stage.kernels.choices
    ):
        yield "buckets do not follow from layout and device"


def _plan(stage: ExecutionPlan) -> Iterator[str]:
    if stage.format != PLAN_FORMAT:
        yield f"format is {stage.format}, not {PLAN_FORMAT}"
    if stage.kvir_version != __version__:
        yield f"made by kvir {stage.kvir_version}, not {__version__}"
    if stage.fingerprint != plan_fingerprint(stage.layout):
        yield "the fingerprint is not that of policy, model and layout"
