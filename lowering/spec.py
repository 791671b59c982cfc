"""What is true of every finished stage.  Checked after each pass, and of every stage of a plan file that is
loaded.

A user's mistake is a diagnostic of a pass; a broken spec is a mistake of kvir, or of whoever edited a plan
file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

from kvir import __version__
from kvir.kernels.catalog import OPS
from kvir.lowering.budget import retentions, within
from kvir.lowering.device_facts import DEVICES
from kvir.lowering.executable import unexecuted
from kvir.lowering.graph_buckets import decode_buckets
from kvir.lowering.kernel_plan import choose
from kvir.lowering.layout import (
    MAX_PAGE_TOKENS,
    TABLE_ENTRY_BYTES,
    head_page_bytes,
    logical_ratio,
    residency_classes,
)
from kvir.lowering.model_facts import facts_errors
from kvir.lowering.plan_fingerprint import PLAN_FORMAT, plan_fingerprint
from kvir.lowering.resolve import governing
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


def every_stage(plan: ExecutionPlan) -> tuple[AnyStage, ...]:
    """All stages of a plan, in the order of lowering."""
    bound = plan.budgeted.bound
    kernels = plan.buckets.kernels
    return (bound.verified, bound, plan.budgeted, plan.layout, kernels, plan.buckets, plan)


def _verified(stage: VerifiedPolicy) -> Iterator[str]:
    if len(stage.policy.rules) > MAX_RULES:
        yield f"more than {MAX_RULES} rules"
    else:
        yield from verified_errors(stage.policy)


def _bound(stage: BoundPolicy) -> Iterator[str]:
    yield from facts_errors(stage.model)
    policy = stage.verified.policy
    for phase, table in zip(PHASES, (stage.prefill_rule, stage.decode_rule), strict=True):
        if table != governing(policy, stage.model, phase):
            yield f"the rules of {phase} are not the last ones that cover each unit"


def _budgeted(stage: BudgetedPolicy) -> Iterator[str]:
    bound = stage.bound
    for word, path in unexecuted(bound.verified.policy):
        yield f"the runtime cannot execute `{word}` at {path}"
    for phase, have, governed in (
        ("prefill", stage.prefill, bound.prefill_rule),
        ("decode", stage.decode, bound.decode_rule),
    ):
        if have != retentions(bound, governed):
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
    if stage.head_page_bytes != head_page_bytes(stage.page_tokens, stage.head_dim, stage.dtype):
        yield "head_page_bytes is not K and V of one head-page"
    if stage.table_bytes_per_page != TABLE_ENTRY_BYTES * stage.unit_count:
        yield "table_bytes_per_page is not one entry per unit"
    if stage.logical_ratio != logical_ratio(stage.classes, stage.unit_count):
        yield "logical_ratio does not follow from the full units"


def _kernels(stage: KernelPlan) -> Iterator[str]:
    if stage.device not in DEVICES:
        yield f"unknown device `{stage.device}`"
        return
    if stage.choices != tuple(choose(op, stage.device, stage.layout) for op in OPS):
        yield "choices do not follow from the kernel catalogue"
    if not all(c.implementation for c in stage.choices):
        yield "an op has no implementation"


def _buckets(stage: GraphBuckets) -> Iterator[str]:
    if stage.decode != decode_buckets(stage.kernels.layout, DEVICES[stage.kernels.device]):
        yield "buckets do not follow from layout and device"


def _plan(stage: ExecutionPlan) -> Iterator[str]:
    if stage.format != PLAN_FORMAT:
        yield f"format is {stage.format}, not {PLAN_FORMAT}"
    if stage.kvir_version != __version__:
        yield f"made by kvir {stage.kvir_version}, not {__version__}"
    if stage.fingerprint != plan_fingerprint(stage.layout):
        yield "the fingerprint is not that of policy, model and layout"
