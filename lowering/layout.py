"""BudgetedPolicy -> LayoutPlan: residency classes and bytes (KV4xx)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvir.lowering.footprint import ceil_div, span_in
from kvir.lowering.stages import (
    DTYPE_BYTES,
    AttentionLayer,
    BudgetedPolicy,
    Dtype,
    LayoutPlan,
    ModelFacts,
    PageSpan,
    ResidencyClass,
    Retention,
)
from kvir.policy_ir.diagnostic import Report

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
            head_page_bytes=head_page_bytes(self.page_tokens, layer.head_dim, self.dtype),
            table_bytes_per_page=TABLE_ENTRY_BYTES * unit_count,
            logical_ratio=logical_ratio(classes, unit_count),
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


def head_page_bytes(page_tokens: int, head_dim: int, dtype: Dtype) -> int:
    """K and V of `page_tokens` rows of one unit."""
    return 2 * page_tokens * head_dim * DTYPE_BYTES[dtype]


def page_span(retention: Retention, page_tokens: int) -> PageSpan:
    """The pages that hold a retention at every length."""
    if retention.recent_tokens is None:
        return PageSpan(sink_pages=0, window_pages=None)
    return PageSpan(
        sink_pages=ceil_div(retention.sink_tokens, page_tokens),
        window_pages=ceil_div(retention.recent_tokens - 1, page_tokens),
    )


def residency_classes(budgeted: BudgetedPolicy, page_tokens: int) -> tuple[ResidencyClass, ...]:
    """Units grouped by the pages they hold: full units first, then by descending window and sinks."""
    units: dict[tuple[PageSpan, PageSpan], list[int]] = {}
    spans: dict[Retention, PageSpan] = {}

    def span(retention: Retention) -> PageSpan:
        if retention not in spans:
            spans[retention] = page_span(retention, page_tokens)
        return spans[retention]

    flat = (
        (before, after)
        for row, later in zip(budgeted.prefill, budgeted.decode, strict=True)
        for before, after in zip(row, later, strict=True)
    )
    for unit, (before, after) in enumerate(flat):
        units.setdefault((span(before), span(after)), []).append(unit)
    return tuple(
        ResidencyClass(
            sink_pages=prefill.sink_pages,
            window_pages=prefill.window_pages,
            units=tuple(units[prefill, decode]),
            decode=None if decode == prefill else decode,
        )
        for prefill, decode in sorted(units, key=lambda pair: (_rank(pair[0]), _rank(pair[1])))
    )


def logical_ratio(classes: tuple[ResidencyClass, ...], unit_count: int) -> int:
    """Logical tokens per full-KV token of the pool: how many more tokens fit than if every unit kept
    everything.

    What stays as sequences grow is the share of full units, so that is the limit; without any, a cap keeps
    the residency table small.
    """
    full_units = sum(len(c.units) for c in classes if span_in(c, "decode").window_pages is None)
    if not full_units:
        return MAX_LOGICAL_RATIO
    return min(MAX_LOGICAL_RATIO, ceil_div(unit_count, full_units))


def _rank(span: PageSpan) -> tuple[bool, int, int]:
    return span.window_pages is not None, -(span.window_pages or 0), -span.sink_pages
