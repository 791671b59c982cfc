"""Every stage as short text for people: `--print-after`, golden cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, assert_never

from kvir.lowering.places import ranges, rule_name
from kvir.lowering.spec import AnyStage
from kvir.lowering.stage_words import span_words, tile_words, trigger_words, words
from kvir.lowering.stages import (
    BoundPolicy,
    BudgetedPolicy,
    ExecutionPlan,
    GraphBuckets,
    KernelPlan,
    LayoutPlan,
    ModelFacts,
    VerifiedPolicy,
)
from kvir.policy_ir.printer import print_policy

T = TypeVar("T")


def stage_text(stage: AnyStage) -> str:
    """A stage as lines; what earlier stages say is not repeated."""
    match stage:
        case VerifiedPolicy():
            return print_policy(stage.policy)
        case BoundPolicy():
            lines = _by_phase(stage.model, stage.prefill_rule, stage.decode_rule, rule_name)
        case BudgetedPolicy():
            lines = _by_phase(stage.bound.model, stage.prefill, stage.decode, words)
        case LayoutPlan():
            lines = _layout(stage)
        case KernelPlan():
            lines = _kernels(stage)
        case GraphBuckets():
            lines = _buckets(stage)
        case ExecutionPlan():
            lines = iter([f"format {stage.format}, kvir {stage.kvir_version}", stage.fingerprint])
        case _:
            assert_never(stage)
    return "".join(f"{line}\n" for line in lines)


def unit_groups(model: ModelFacts, table: Sequence[Sequence[T]]) -> Iterator[tuple[str, T]]:
    """Units of equal value as `layers 0..3, heads 0..1`; consecutive layers of equal rows are joined."""
    start = 0
    for index in range(1, len(table) + 1):
        if index < len(table) and table[index] == table[start]:
            continue
        layers = ranges(layer.layer_id for layer in model.layers[start:index])
        row = table[start]
        by_value: dict[T, list[int]] = {}
        for head, value in enumerate(row):
            by_value.setdefault(value, []).append(head)
        for value, heads in by_value.items():
            yield f"layers {layers}, heads {ranges(heads)}", value
        start = index


def class_units(layout: LayoutPlan, units: Sequence[int]) -> Iterator[str]:
    """The units of a class as `layers 0..3, heads 0..1`."""
    members = set(units)
    model = layout.budgeted.bound.model
    heads = range(layout.kv_heads)
    table = [[i * layout.kv_heads + h in members for h in heads] for i in range(len(model.layers))]
    return (where for where, inside in unit_groups(model, table) if inside)


def _by_phase(
    model: ModelFacts, prefill: Sequence[Sequence[T]], decode: Sequence[Sequence[T]], name: Callable[[T], str]
) -> Iterator[str]:
    phases = (
        [("prefill, decode", prefill)] if prefill == decode else [("prefill", prefill), ("decode", decode)]
    )
    for phase, table in phases:
        yield f"{phase}:"
        for where, value in unit_groups(model, table):
            yield f"  {where}: {name(value)}"


def _layout(layout: LayoutPlan) -> Iterator[str]:
    rows = f"{layout.page_tokens} rows of {layout.head_dim} {layout.dtype}"
    yield f"head-page: {rows}, {layout.head_page_bytes} bytes"
    yield f"units: {layout.unit_count}, {layout.table_bytes_per_page} bytes of table per logical page"
    yield f"logical ratio: {layout.logical_ratio}"
    for i, c in enumerate(layout.classes):
        decode = f"; in decode {span_words(c.decode)}" if c.decode is not None else ""
        selects = f"; selects {' and '.join(map(trigger_words, c.selects))}" if c.selects else ""
        yield f"class {i}: {len(c.units)} units, {span_words(c.prefill)}{decode}{selects}"
        for where in class_units(layout, c.units):
            yield f"  {where}"
    for i, c in enumerate(layout.compact):
        found = [words(r) for r in (c.prefill, c.decode) if r.selection is not None]
        yield f"compact class {i}: {len(c.units)} units, {'; '.join(found)}"
        for where in class_units(layout, c.units):
            yield f"  {where}"


def _buckets(buckets: GraphBuckets) -> Iterator[str]:
    if not buckets.decode:
        yield "decode graphs: none"
    for b in buckets.decode:
        yield f"decode graph: batch {b.batch}, {b.splits} splits, {b.static_bytes} bytes static"


def _kernels(kernels: KernelPlan) -> Iterator[str]:
    for choice in kernels.choices:
        rejected = "; ".join(f"`{name}` {reason}" for name, reason in choice.rejected)
        where = "" if choice.layers is None else f", layers {ranges(choice.layers)}"
        tile = "" if choice.tile is None else f", {tile_words(choice.tile)}"
        built = "" if choice.built else ", not built yet"
        more = f" ({rejected})" if rejected else ""
        yield f"{choice.op}{where}: {choice.implementation}{tile}{built}{more}"
