"""BudgetedPolicy -> LayoutPlan: residency classes and bytes (KV4xx)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvir.lowering.footprint import ceil_div, span_in
from kvir.lowering.places import place
from kvir.lowering.stages import (
    DTYPE_BYTES,
    AttentionLayer,
    BudgetedPolicy,
    CompactClass,
    Dtype,
    LayoutPlan,
    ModelFacts,
    PageSpan,
    ResidencyClass,
    Retention,
)
from kvir.policy_ir.diagnostic import Report
from kvir.policy_ir.nodes import Trigger
from kvir.policy_ir.rules import Merge

BIAS_BYTES = 4  # of a row, float32
TABLE_ENTRY_BYTES = 4  # int32 head-page of one (logical page, unit)
MAX_LOGICAL_RATIO = 64
PAGE_TOKENS = 16
MAX_PAGE_TOKENS = 1024


@dataclass(frozen=True)
class Layout:
    name: ClassVar[str] = "layout"
    page_tokens: int
    dtype: Dtype
    report: Report

    def __call__(self, budgeted: BudgetedPolicy) -> LayoutPlan:
        model = budgeted.bound.model
        if not 2 <= self.page_tokens <= MAX_PAGE_TOKENS or self.page_tokens & (self.page_tokens - 1):
            self.report.error(
                "KV402",
                f"page_tokens is {self.page_tokens}; it must be a power of two from 2 to {MAX_PAGE_TOKENS}",
                None,
                help=f"use {PAGE_TOKENS}",
            )
            self.report.raise_if_errors()
        self._one_shape(model)
        self._one_dtype(budgeted)
        layer = model.layers[0]
        classes = residency_classes(budgeted, self.page_tokens)
        unit_count = sum(x.kv_heads for x in model.layers)
        return LayoutPlan(
            budgeted=budgeted,
            page_tokens=self.page_tokens,
            kv_heads=layer.kv_heads,
            query_heads=layer.query_heads,
            head_dim=layer.head_dim,
            dtype=self.dtype,
            unit_count=unit_count,
            classes=classes,
            head_page_bytes=head_page_bytes(
                self.page_tokens, layer.head_dim, self.dtype, biased=biased(budgeted)
            ),
            table_bytes_per_page=TABLE_ENTRY_BYTES * unit_count,
            logical_ratio=logical_ratio(classes, unit_count),
            compact=compact_classes(budgeted, self.page_tokens),
        )

    def _one_shape(self, model: ModelFacts) -> None:
        def shape(layer: AttentionLayer) -> tuple[int, int, int]:
            return layer.kv_heads, layer.query_heads, layer.head_dim

        first = model.layers[0]
        for layer in model.layers:
            if shape(layer) != shape(first):
                self.report.error(
                    "KV401",
                    f"layers of `{model.arch}` differ in shape: "
                    f"layer {first.layer_id} has {first.kv_heads} KV heads of {first.head_dim}, "
                    f"layer {layer.layer_id} has {layer.kv_heads} of {layer.head_dim}; "
                    "kvir's one pool of head-pages needs one shape",
                    None,
                    help="serve this model without `--kv-ir`",
                )
                return

    def _one_dtype(self, budgeted: BudgetedPolicy) -> None:
        for i, rule in enumerate(budgeted.bound.verified.policy.rules):
            if rule.store not in ("auto", self.dtype):
                self.report.error(
                    "KV403",
                    f"rules[{i}] stores rows as {rule.store}, and the cache is {self.dtype}: "
                    f"kvir's one pool of head-pages needs one dtype (refused by `{self.name}`)",
                    place(self.report, f"$.rules[{i}].store"),
                    help="leave `store` out, and choose the dtype of the whole cache with `--dtype`",
                )


def head_page_bytes(page_tokens: int, head_dim: int, dtype: Dtype, *, biased: bool) -> int:
    """K and V of `page_tokens` rows of one unit, and their biases where rows are merged."""
    return page_tokens * (2 * head_dim * DTYPE_BYTES[dtype] + (BIAS_BYTES if biased else 0))


def biased(budgeted: BudgetedPolicy) -> bool:
    """Whether a rule in force merges rows, so that rows have biases."""
    bound = budgeted.bound
    rules = bound.verified.policy.rules
    governing = {rule for table in (bound.prefill_rule, bound.decode_rule) for row in table for rule in row}
    overflows = [rules[rule].overflow for rule in governing if rule >= 0]
    return any(isinstance(overflow, Merge) and overflow.bias == "lse" for overflow in overflows)


def page_span(retention: Retention, page_tokens: int) -> PageSpan:
    """The pages that hold a retention at every length."""
    if retention.recent_tokens is None:
        return PageSpan(sink_pages=0, window_pages=None)
    return PageSpan(
        sink_pages=ceil_div(retention.sink_tokens, page_tokens),
        window_pages=ceil_div(retention.recent_tokens - 1, page_tokens),
    )


def residency_classes(budgeted: BudgetedPolicy, page_tokens: int) -> tuple[ResidencyClass, ...]:
    """Units grouped by the pages they hold: full units first, then those that select, then by descending
    window and sinks."""
    units: dict[tuple[PageSpan, PageSpan, tuple[Trigger, ...]], list[int]] = {}
    spans = _Spans(page_tokens)
    for unit, (before, after) in enumerate(_flat(budgeted)):
        units.setdefault((spans(before), spans(after), triggers(before, after)), []).append(unit)
    return tuple(
        ResidencyClass(
            sink_pages=prefill.sink_pages,
            window_pages=prefill.window_pages,
            units=tuple(units[prefill, decode, selects]),
            decode=None if decode == prefill else decode,
            selects=selects,
        )
        for prefill, decode, selects in sorted(
            units, key=lambda key: (_rank(key[0]), _rank(key[1]), bool(key[2]), units[key][0])
        )
    )


def compact_classes(budgeted: BudgetedPolicy, page_tokens: int) -> tuple[CompactClass, ...]:
    """Units that select, grouped by equal retentions, in the order of their first unit."""
    units: dict[tuple[Retention, Retention], list[int]] = {}
    for unit, (before, after) in enumerate(_flat(budgeted)):
        if triggers(before, after):
            units.setdefault((before, after), []).append(unit)
    spans = _Spans(page_tokens)
    return tuple(
        CompactClass(
            prefill=before,
            decode=after,
            prefill_span=spans(before),
            decode_span=spans(after),
            units=tuple(members),
        )
        for (before, after), members in units.items()
    )


def triggers(before: Retention, after: Retention) -> tuple[Trigger, ...]:
    """When a unit selects, in prefill and in decode."""
    selections = (r.selection for r in (before, after) if r.selection is not None)
    return tuple(trigger for selection in selections for trigger in selection.triggers)


def logical_ratio(classes: tuple[ResidencyClass, ...], unit_count: int) -> int:
    """Logical tokens per full-KV token of the pool: how many more tokens fit than if every unit kept
    everything.

    What stays as sequences grow is the share of full units, so that is the limit; without any, a cap keeps
    the residency table small.  Units that select give a prompt's memory back when it ends, and the tree may
    hold it as cache; its logical pages stay with the request, so they are as if such units kept nothing.
    """
    by_position = [c for c in classes if not c.selects]
    full_units = sum(len(c.units) for c in by_position if span_in(c, "decode").window_pages is None)
    if not full_units:
        return MAX_LOGICAL_RATIO
    return min(MAX_LOGICAL_RATIO, ceil_div(unit_count, full_units))


class _Spans:
    """Page spans of retentions, each computed once."""

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._known: dict[Retention, PageSpan] = {}

    def __call__(self, retention: Retention) -> PageSpan:
        if retention not in self._known:
            self._known[retention] = page_span(retention, self._page_tokens)
        return self._known[retention]


def _flat(budgeted: BudgetedPolicy) -> Iterator[tuple[Retention, Retention]]:
    """(in prefill, in decode) of every unit, in order."""
    for row, later in zip(budgeted.prefill, budgeted.decode, strict=True):
        yield from zip(row, later, strict=True)


def _rank(span: PageSpan) -> tuple[bool, int, int]:
    return span.window_pages is not None, -(span.window_pages or 0), -span.sink_pages
