"""What a plan costs, in head-pages and bytes, exactly.

Pure integer arithmetic over a `LayoutPlan`, used by the server to admit requests and by the planner to show
people what will happen: the same functions, so that the two cannot disagree.

`n` is the length of a sequence in tokens, everything committed to the cache; P is `page_tokens`.
"""

from __future__ import annotations

from msgspec import Struct

from kvir.lowering.stages import LayoutPlan, PageSpan, ResidencyClass
from kvir.policy_ir.nodes import MAX_TOKENS, Phase


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# ---- one unit ----------------------------------------------------------------------------------------------


def span_pages(span: PageSpan, page_tokens: int, n: int) -> int:
    """Head-pages that one unit holds at length `n`."""
    pages = ceil_div(n, page_tokens)
    if span.window_pages is None:
        return pages
    start = max(span.sink_pages, n // page_tokens - span.window_pages)
    return min(span.sink_pages, pages) + max(0, pages - start)


def span_peak_pages(span: PageSpan, page_tokens: int, n: int) -> int:
    """The most head-pages that one unit holds at any length up to `n` (for P >= 2)."""
    pages = ceil_div(n, page_tokens)
    if span.window_pages is None:
        return pages
    return min(pages, span.sink_pages + span.window_pages + 1)


# ---- one request -------------------------------------------------------------------------------------------


def resident_pages(layout: LayoutPlan, n: int, phase: Phase = "prefill") -> int:
    """Head-pages that a request of length `n` holds between two steps of `phase`."""
    return sum(len(c.units) * span_pages(span_in(c, phase), layout.page_tokens, n) for c in layout.classes)


def peak_pages(layout: LayoutPlan, n: int) -> int:
    """The most head-pages that a request holds on its way to length `n`: the bound that admission reserves.

    Every class reaches its own bound at the same length (one token past a page boundary), so the sum is
    tight.  What decode keeps is a subset of what prefill keeps, so the prefill spans bound both.
    """
    return sum(len(c.units) * span_peak_pages(c.prefill, layout.page_tokens, n) for c in layout.classes)


def resident_bytes(layout: LayoutPlan, n: int, phase: Phase = "prefill") -> int:
    return resident_pages(layout, n, phase) * layout.head_page_bytes


def peak_bytes(layout: LayoutPlan, n: int) -> int:
    return peak_pages(layout, n) * layout.head_page_bytes


def full_pages(layout: LayoutPlan, n: int) -> int:
    """Head-pages of the same request when every unit keeps everything."""
    return layout.unit_count * ceil_div(n, layout.page_tokens)


def full_bytes(layout: LayoutPlan, n: int) -> int:
    return full_pages(layout, n) * layout.head_page_bytes


def span_in(c: ResidencyClass, phase: Phase) -> PageSpan:
    return c.decode if phase == "decode" and c.decode is not None else c.prefill


# ---- one pool ----------------------------------------------------------------------------------------------


class PoolSize(Struct, frozen=True):
    """How a given number of bytes is cut into a pool and its residency table."""

    head_pages: int
    logical_pages: int
    bytes: int  # pool and table, at most what was given


def pool_size(layout: LayoutPlan, memory_bytes: int) -> PoolSize:
    """The largest pool, in whole logical pages of all units, that fits in `memory_bytes` together with its
    table.
    """
    step_bytes = (
        layout.unit_count * layout.head_page_bytes + layout.logical_ratio * layout.table_bytes_per_page
    )
    steps = max(0, memory_bytes) // step_bytes
    return PoolSize(
        head_pages=steps * layout.unit_count,
        logical_pages=steps * layout.logical_ratio,
        bytes=steps * step_bytes,
    )


def longest_context(layout: LayoutPlan, memory_bytes: int) -> int:
    """The longest single sequence, in tokens, that a pool of `memory_bytes` holds; the model's own limit not
    applied.
    """
    pool = pool_size(layout, memory_bytes)
    low, high = 0, min(pool.logical_pages, MAX_TOKENS // layout.page_tokens)
    # peak_pages grows with n, page by page
    while low < high:
        middle = (low + high + 1) // 2
        if peak_pages(layout, middle * layout.page_tokens) <= pool.head_pages:
            low = middle
        else:
            high = middle - 1
    return low * layout.page_tokens


def concurrency(layout: LayoutPlan, n: int, memory_bytes: int) -> int:
    """How many requests of length `n` >= 1 fit in a pool of `memory_bytes` at once, sharing nothing."""
    pool = pool_size(layout, memory_bytes)
    return min(
        pool.head_pages // peak_pages(layout, n), pool.logical_pages // ceil_div(n, layout.page_tokens)
    )


# ---- one layer ---------------------------------------------------------------------------------------------


class LayerCost(Struct, frozen=True):
    """The cost of one attention layer: a request of length n takes at most n * bytes_per_token +
    window_bytes, pages rounded up."""

    full_units: int
    bytes_per_token: int  # of the units that keep everything
    window_bytes: int  # the bound of the others


def layer_costs(layout: LayoutPlan) -> tuple[LayerCost, ...]:
    """The cost of every attention layer, in order."""
    layers = layout.unit_count // layout.kv_heads
    full_units = [0] * layers
    window_pages = [0] * layers
    for c in layout.classes:
        for unit in c.units:
            if c.window_pages is None:
                full_units[unit // layout.kv_heads] += 1
            else:
                window_pages[unit // layout.kv_heads] += c.sink_pages + c.window_pages + 1
    row_bytes = layout.head_page_bytes // layout.page_tokens
    return tuple(
        LayerCost(
            full_units=full,
            bytes_per_token=full * row_bytes,
            window_bytes=pages * layout.head_page_bytes,
        )
        for full, pages in zip(full_units, window_pages, strict=True)
    )
