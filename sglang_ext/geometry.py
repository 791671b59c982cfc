"""The layout of a plan as arrays: what the residency code indexes with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvir.lowering.stages import LayoutPlan, PageSpan
from kvir.sglang_ext.ranks import ALONE, Ranks

NO_WINDOW = 1 << 40  # window_pages of a class that keeps everything

IntArray = NDArray[np.int64]


class Spans:
    """What each class holds in one phase: at n tokens, pages [0, sink_pages) and [first_page(n), ceil(n /
    P)).
    """

    def __init__(self, spans: list[PageSpan]) -> None:
        self.sink_pages = np.array([s.sink_pages for s in spans], np.int64)
        self.window_pages = np.array(
            [NO_WINDOW if s.window_pages is None else s.window_pages for s in spans], np.int64
        )

    def first_page(self, page_floor: int) -> IntArray:
        """[C] first page after the sinks that a request with `page_floor` whole pages keeps.

        The window lags to the page floor: a prefix match is page-aligned, so a request of n tokens must keep
        a whole window below its page floor, or its own second turn could not find it.
        """
        return np.maximum(page_floor - self.window_pages, self.sink_pages)


class Geometry:
    """Classes, units and layers of one plan.

    A *class* is a set of units whose head-pages live and die together; a request of n tokens holds, for class
    c, its pages [0, sink_pages[c]) and [first_window_page(c, n), ceil(n / P)).
    """

    def __init__(self, layout: LayoutPlan, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.page_tokens = layout.page_tokens
        self.unit_count = layout.unit_count
        self.kv_heads = layout.kv_heads
        self.layer_count = layout.unit_count // layout.kv_heads
        self.class_units: list[IntArray] = [np.asarray(c.units, np.int64) for c in layout.classes]
        self.class_leaders = np.array([units[0] for units in self.class_units], np.int64)
        self.class_count = len(self.class_units)
        self.rank_of_unit: IntArray = ranks.rank_of_unit(layout)
        self.lane_of_unit: IntArray = ranks.lane_of_unit(layout)
        self.lane_count = ranks.lane_count(layout)
        self.own_heads = ranks.heads(layout.kv_heads)
        head_of_unit = np.arange(self.unit_count) % self.kv_heads
        self.own_units: IntArray = np.nonzero(np.isin(head_of_unit, self.own_heads))[0]
        self.rank_units: IntArray = np.bincount(self.rank_of_unit, minlength=ranks.count)  # [R]
        # head-pages of each rank per page of the class: [C, R]
        self.class_ranks = np.stack(
            [np.bincount(self.rank_of_unit[u], minlength=ranks.count) for u in self.class_units]
        )
        self.prefill = Spans([c.prefill for c in layout.classes])
        self.decode = Spans([c.decode or c.prefill for c in layout.classes])
        self.selects = np.array([bool(c.selects) for c in layout.classes], bool)  # [C] keeps rows by score
        self.phased = bool(self.selects.any()) or any(c.decode is not None for c in layout.classes)
        self.unit_sink_pages = np.zeros(self.unit_count, np.int64)  # of units that keep rows by position
        for c, units in enumerate(self.class_units):
            self.unit_sink_pages[units] = 0 if self.selects[c] else self.decode.sink_pages[c]
        kept = [unit for layer in layout.budgeted.decode for unit in layer]
        self.unit_sink_tokens = np.array([r.sink_tokens for r in kept], np.int64)
        self.class_lanes: list[IntArray] = [self.lane_of_unit[u] for u in self.class_units]
        # head-pages of each lane per page of the class: [C, lanes]
        self.lane_units = np.stack(
            [np.bincount(lanes, minlength=self.lane_count) for lanes in self.class_lanes]
        )

    def is_full(self, c: int) -> bool:
        """The prefix tree keeps every page of the class: a prompt's rows all stay until its nodes are
        evicted.
        """
        return bool(self.prefill.window_pages[c] >= NO_WINDOW)

    def spans(self, decoding: bool) -> Spans:
        return self.decode if decoding else self.prefill

    def any_lane(self, lane: int) -> int:
        """The lane that stands for any layer of the same rank."""
        return lane - lane % (self.layer_count + 1) + self.layer_count

    def by_rank(self, lanes: IntArray) -> IntArray:
        """[R] sums of counts by lane."""
        return lanes.reshape(self.ranks.count, -1).sum(1)

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)
