"""The layout of a plan as arrays: what the residency code indexes with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvir.lowering.stages import LayoutPlan

NO_WINDOW = 1 << 40  # window_pages of a class that keeps everything

IntArray = NDArray[np.int64]


class Geometry:
    """Classes, units and layers of one plan.

    A *class* is a set of units whose head-pages live and die together; a request of n tokens holds, for class
    c, its pages [0, sink_pages[c]) and [first_window_page(c, n), ceil(n / P)).
    """

    def __init__(self, layout: LayoutPlan) -> None:
        self.page_tokens = layout.page_tokens
        self.unit_count = layout.unit_count
        self.kv_heads = layout.kv_heads
        self.layer_count = layout.unit_count // layout.kv_heads
        self.class_units: list[IntArray] = [np.asarray(c.units, np.int64) for c in layout.classes]
        self.class_count = len(self.class_units)
        self.class_size = np.array([len(u) for u in self.class_units], np.int64)
        self.sink_pages = np.array([c.sink_pages for c in layout.classes], np.int64)
        self.window_pages = np.array(
            [NO_WINDOW if c.window_pages is None else c.window_pages for c in layout.classes], np.int64
        )
        self.layer_of_unit: IntArray = np.arange(self.unit_count) // self.kv_heads
        self.class_layers: list[IntArray] = [self.layer_of_unit[u] for u in self.class_units]
        # head-pages of each layer per page of the class, for needs counted per layer: [C, layers]
        self.layer_units = np.stack(
            [np.bincount(layers, minlength=self.layer_count) for layers in self.class_layers]
        )

    def is_full(self, c: int) -> bool:
        return bool(self.window_pages[c] >= NO_WINDOW)

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def first_window_page(self, tokens: int) -> IntArray:
        """[C] first page that a request of `tokens` tokens keeps, sinks aside.

        The window lags to the page floor: a prefix match is page-aligned, so a request of n tokens must keep
        a whole window below its page floor, or its own second turn could not find it.
        """
        return np.maximum(tokens // self.page_tokens - self.window_pages, 0)

    def held_pages(self, first: IntArray, page_count: int) -> IntArray:
        """[C] pages held when the window begins at page `first[c]` and the request has `page_count` pages."""
        return np.minimum(self.sink_pages, page_count) + np.maximum(
            page_count - np.maximum(first, self.sink_pages), 0
        )
