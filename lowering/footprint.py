"""What a plan costs, in head-pages and bytes: exactly, or within bounds where scores decide how many rows
stay.

Pure integer arithmetic over a `LayoutPlan`, used by the server to admit requests and by the planner to show
people what will happen: the same functions, so that the two cannot disagree.

`n` is the length of a sequence in tokens, everything committed to the cache; P is `page_tokens`.  Where a
plan selects rows by score, a request has two terms: its *peak*, while the prompt is still there and the
compact pages are reserved, and what it holds when the selection is *done*.
"""

from __future__ import annotations

from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from kvir.lowering.course import NEVER, Course, most_left
from kvir.lowering.spans import Bounds, ceil_div, span_pages, span_peak_pages
from kvir.lowering.stages import LayoutPlan, PageSpan, ResidencyClass
from kvir.policy_ir.nodes import MAX_TOKENS, Phase

CHUNK_TOKENS = 8192  # of a prompt at once, unless the server says otherwise: SGLang's --chunked-prefill-size


# ---- one request -------------------------------------------------------------------------------------------


def resident_pages(layout: LayoutPlan, n: int, phase: Phase = "prefill") -> int:
    """Head-pages that a request of length `n` holds between two steps of `phase`; at most, where scores
    decide.

    In `prefill` nothing has been selected yet; in `decode` all n tokens are its prompt, and were.
    """
    size = layout.page_tokens
    pages = sum(len(c.units) * span_pages(span_in(c, phase), size, n) for c in _by_position(layout))
    for c in layout.compact:
        if phase == "prefill":
            pages += len(c.units) * span_pages(c.prefill_span, size, n)
        else:
            pages += Course(layout, c, n).resident(n).most
    return pages


def peak_pages(
    layout: LayoutPlan, n: int, prompt_tokens: int | None = None, chunk_tokens: int = CHUNK_TOKENS
) -> int:
    """The most head-pages that a request holds on its way to length `n`: the bound that admission reserves.

    `prompt_tokens` of it are prompt, by default all.  Every class that keeps rows by position reaches its own
    bound at the same length (one token past a page boundary), so the sum is tight.  What decode keeps by
    position is a subset of what prefill keeps, so the prefill spans bound both.
    """
    pages = sum(
        len(c.units) * span_peak_pages(c.prefill, layout.page_tokens, n) for c in _by_position(layout)
    )
    prompt = n if prompt_tokens is None else min(n, prompt_tokens)
    return pages + sum(Course(layout, c, prompt).peak(n, chunk_tokens) for c in layout.compact)


def growth_peak_pages(layout: LayoutPlan, n: int, prompt_tokens: int) -> int:
    """The same from the end of the prompt on: what scores did not choose has gone by then."""
    pages = sum(
        len(c.units) * span_peak_pages(c.prefill, layout.page_tokens, n) for c in _by_position(layout)
    )
    return pages + sum(Course(layout, c, min(n, prompt_tokens)).growth_peak(n) for c in layout.compact)


def done_pages(layout: LayoutPlan, n: int, prompt_tokens: int | None = None) -> Bounds:
    """Head-pages of a request of length `n` when what its triggers ask for is done."""
    prompt = n if prompt_tokens is None else min(n, prompt_tokens)
    static = sum(
        len(c.units) * span_pages(span_in(c, "decode"), layout.page_tokens, n) for c in _by_position(layout)
    )
    held = [Course(layout, c, prompt).resident(n) for c in layout.compact]
    return Bounds(static + sum(h.least for h in held), static + sum(h.most for h in held))


def done_length(layout: LayoutPlan, prompt_tokens: int) -> int:
    """The length at which a prompt is done: every trigger that will ever fire has fired once."""
    firsts = (Course(layout, c, prompt_tokens).first_fold[1] for c in layout.compact)
    return prompt_tokens + max((tokens for tokens in firsts if tokens < NEVER), default=0)


def full_pages(layout: LayoutPlan, n: int) -> int:
    """Head-pages of the same request when every unit keeps everything."""
    return layout.unit_count * ceil_div(n, layout.page_tokens)


def resident_bytes(layout: LayoutPlan, n: int, phase: Phase = "prefill") -> int:
    return resident_pages(layout, n, phase) * layout.head_page_bytes


def peak_bytes(layout: LayoutPlan, n: int, prompt_tokens: int | None = None) -> int:
    return peak_pages(layout, n, prompt_tokens) * layout.head_page_bytes


def done_bytes(layout: LayoutPlan, n: int, prompt_tokens: int | None = None) -> Bounds:
    least, most = done_pages(layout, n, prompt_tokens)
    return Bounds(least * layout.head_page_bytes, most * layout.head_page_bytes)


def full_bytes(layout: LayoutPlan, n: int) -> int:
    return full_pages(layout, n) * layout.head_page_bytes


def span_in(c: ResidencyClass, phase: Phase) -> PageSpan:
    return c.decode if phase == "decode" and c.decode is not None else c.prefill


def _by_position(layout: LayoutPlan) -> list[ResidencyClass]:
    """The classes whose rows go by position alone."""
    return [c for c in layout.classes if not c.selects]


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


def decoding(layout: LayoutPlan, n: int, memory_bytes: int) -> int:
    """How many requests of `n` prompt tokens fit at once when one of them is in prefill and the others are
    done.

    A plan that selects needs its peak only for prompts in prefill, and the server takes one after the other.
    """
    pool = pool_size(layout, memory_bytes)
    length = done_length(layout, n)
    peak, done = peak_pages(layout, length, n), done_pages(layout, length, n).most
    if pool.head_pages < peak:
        return 0
    # where all units select, a prompt that is done is cache, whose logical pages may go but for the last
    prompt = ceil_div(n, layout.page_tokens)
    all_select = all(c.selects for c in layout.classes)
    logical = pool.logical_pages - prompt + 1 if all_select else pool.logical_pages // prompt
    return min((pool.head_pages - peak) // done + 1, logical)


# ---- one layer ---------------------------------------------------------------------------------------------


class LayerCost(Struct, frozen=True):
    """The cost of one attention layer: a request of length n takes at most n * bytes_per_token +
    window_bytes, pages rounded up.

    Where rows are selected by score, that is of a request that is done, with n the tokens since its
    selection: `window_bytes` has what selections leave of a prompt as long as the model's context.
    """

    full_units: int
    bytes_per_token: int  # of the units that keep everything
    window_bytes: int  # the bound of the others


def layer_costs(layout: LayoutPlan) -> tuple[LayerCost, ...]:
    """The cost of every attention layer, in order."""
    layers = layout.unit_count // layout.kv_heads
    full_units = [0] * layers
    window_pages = [0] * layers
    for c in _by_position(layout):
        for unit in c.units:
            if c.window_pages is None:
                full_units[unit // layout.kv_heads] += 1
            else:
                window_pages[unit // layout.kv_heads] += c.sink_pages + c.window_pages + 1
    for c in layout.compact:
        for layer, units in groupby(c.units, key=lambda unit: unit // layout.kv_heads):
            inside = replace(c, units=tuple(units))
            grows = c.decode.selection is None and c.decode_span.window_pages is None
            full_units[layer] += len(inside.units) if grows else 0
            window_pages[layer] += most_left(layout, inside)
    row_bytes = layout.head_page_bytes // layout.page_tokens
    return tuple(
        LayerCost(
            full_units=full,
            bytes_per_token=full * row_bytes,
            window_bytes=pages * layout.head_page_bytes,
        )
        for full, pages in zip(full_units, window_pages, strict=True)
    )
