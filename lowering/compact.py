"""Head-pages of one selection by score: bounds before its scores are known, exact where budgets are.

What a selection leaves of a unit lies in compact pages, private to the request, in order.  Later tokens go on
being written to dense pages, from the page floor of the length at which the selection ran.  The partial page
there stays where it is when the window keeps all its rows anyhow (a window of at least P - 1 rows).  So a
unit has

    ceil((kept - n % P) / P) compact pages, and the dense pages from n // P on.

A unit stays dense as long as every row of it is sure to stay.  From its first selection on, each trigger
moves what is left: it writes over the compact pages of the one before, and takes further ones only to keep
more.  A selection reserves its pages while the rows that it chooses from are still there: that is the peak.

P is `page_tokens`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import assert_never

from kvir.lowering.quota import Run, first_run, kept_rows, kept_rows_of_all
from kvir.lowering.spans import Bounds, ceil_div
from kvir.lowering.stages import LayoutPlan, Quota, Selection
from kvir.policy_ir.rules import PrefillChunk, PrefillEnd, Trigger

NO_ROWS = Bounds(0, 0)


def compact_pages(layout: LayoutPlan, units: Sequence[int], run: Run, tail: Bounds) -> Bounds:
    """Compact pages of some units when a selection runs and leaves `tail` rows of each where they are."""
    size, count = layout.page_tokens, len(units)
    one = kept_rows(run)
    low = count * ceil_div(max(0, one.least - tail.most), size)
    high = count * ceil_div(max(0, one.most - tail.least), size)
    if one.exact:
        return Bounds(low, high)
    every = kept_rows_of_all(run, count, [group_count(layout, q, units) for q in run.selection.quotas])
    # pages of so many rows over `count` units: the last page of each is partly empty
    least = ceil_div(max(0, every.least - count * tail.most), size)
    most = (max(0, every.most - count * tail.least) + count * (size - 1)) // size
    return Bounds(max(low, least), min(high, most))


def rewritten_pages(layout: LayoutPlan, units: Sequence[int], before: Run, after: Run) -> int:
    """The most compact pages that some units have while one selection writes over those of another: of each
    unit, as many as the larger of the two takes."""
    size, count = layout.page_tokens, len(units)
    old, new = kept_rows(before), kept_rows(after)
    each = count * ceil_div(max(old.most, new.most), size)
    if old.exact and new.exact:
        return each
    together = sum(compact_pages(layout, units, run, NO_ROWS).most for run in (before, after))
    # what every unit keeps is written over itself
    shared = count * ceil_div(max(0, min(old.least, new.least) - (size - 1)), size)
    return min(each, together - shared)


def tail_stays(selection: Selection, page_tokens: int) -> bool:
    """Whether the window keeps every row of the partial last page, so that they stay where they are."""
    return selection.recent_tokens >= page_tokens - 1


def runs_in_prefill(selection: Selection, prompt: int) -> bool:
    """Whether a prompt is compacted: a trigger fires, and some row can go."""
    fires = any(
        isinstance(t, PrefillChunk) or (isinstance(t, PrefillEnd) and prompt > t.over)
        for t in selection.triggers
    )
    return fires and kept_rows(first_run(selection, prompt, prompt)).least < prompt


def block_tokens(triggers: Iterable[Trigger]) -> int | None:
    """Tokens of a prompt between two selections; None: it selects once, at the end."""
    blocks = [t.tokens for t in triggers if isinstance(t, PrefillChunk) and t.tokens is not None]
    return min(blocks, default=None)


@lru_cache(maxsize=1024)  # admission asks again and again for the same prompt
def first_drop(selection: Selection, prompt: int, block: int | None) -> int | None:
    """The least n so that rows are dropped after the first n tokens of a prompt, with more of it to come.

    Selections run after every `block` tokens; None: at the end alone.
    """
    if block is None or not runs_in_prefill(selection, prompt):
        return None
    ends = range(block, prompt, block)
    return next((n for n in ends if kept_rows(first_run(selection, n, prompt)).most < n), None)


def group_count(layout: LayoutPlan, quota: Quota, units: Sequence[int]) -> int:
    """How many groups of rivals some units belong to."""
    match quota.scope:
        case "head":
            return len(units)
        case "layer":
            return len({unit // layout.kv_heads for unit in units})
        case "model":
            return 1
        case _:
            assert_never(quota.scope)
