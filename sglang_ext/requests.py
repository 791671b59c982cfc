"""What the runtime remembers of a running request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvir.sglang_ext.compact import Compact
from kvir.sglang_ext.geometry import Geometry, IntArray

# attribute of SGLang's Req: the page at which a match of this prompt found the windows gone
BRANCH_PAGE = "kvir_branch_page"


@dataclass
class Landmarks:
    """Page positions whose preceding windows are worth keeping: they make a prefix findable again.

    `branch_page`: another prompt shares the pages before it, but their windows are gone; the window before it
    is kept while this request computes it again.  `prompt_page`: the page floor of this request's prompt.
    `matched_page`: where its match ended, so the next one that branches here finds it as well.
    """

    prompt_page: int = 0
    branch_page: int | None = None
    matched_page: int = 0

    def in_tail(self, index: IntArray, window_pages: int) -> np.ndarray:
        """Which page indices lie in the window before a landmark."""
        tail = self.before_branch(index, window_pages)
        for end in (self.prompt_page, self.matched_page):
            tail |= (index < end) & (index >= end - window_pages)
        return tail

    def before_branch(self, index: IntArray, window_pages: int) -> np.ndarray:
        if self.branch_page is None:
            return np.zeros(len(index), bool)
        return (index < self.branch_page) & (index >= self.branch_page - window_pages)


@dataclass
class RequestState:
    """Keyed by `id(kv)`; holding the record keeps that id unique.  SGLang knows no row number yet when the
    state opens, and request ids may repeat.
    """

    kv: object
    pages: list[int]  # logical page of every P tokens
    tree_pages: int  # the first `tree_pages` of them are owned by the prefix tree
    landmarks: Landmarks
    sinks: IntArray  # [C] the request covers pages [0, sinks[c]) ...
    first: IntArray  # [C] ... and [first[c], end), but for
    hole: IntArray  # [C, 2] pages [start, stop) that never were in memory, until `first` is past them
    page_floor: int  # whole pages of the length that `first` was computed for
    decoding: bool = False  # the spans of decode hold (only in plans whose phases differ)
    publishes: bool = True  # its prompt goes into the tree
    # covered besides: windows before a branch, and prompt pages that decode gave up before the tree took them
    held: list[tuple[int, IntArray]] = field(default_factory=list[tuple[int, IntArray]])
    compact: Compact | None = None  # what a selection left of the prompt
    selects: bool = False  # its prompt is compacted
    published_tokens: int = 0  # of its prompt: their rows depend on no selection, so the tree may hold them
    first_drop_tokens: int = 0  # of its prompt: before this length no selection drops a row
    memory: dict[int, Any] = field(default_factory=dict[int, Any])  # layer -> what scores need of the prompt
    rid: str = ""
    prompt_tokens: int = 0  # tokens to prefill this time (after a retraction: prompt and outputs so far)
    max_new_tokens: int = 0
    # [R] the most head-pages that it holds on its way to the end, and once its prompt is done
    peak_pages: IntArray = field(default_factory=lambda: np.zeros(1, np.int64))
    growth_peak_pages: IntArray = field(default_factory=lambda: np.zeros(1, np.int64))
    cached_tokens: int = 0
    retractions: int = 0

    def head_pages_by_unit(self, geometry: Geometry) -> IntArray:
        """[U] head-pages that each unit of the request covers now; those in the stock of a selection that is
        under way belong to none.
        """
        kept = self._kept_pages()
        found = np.zeros(geometry.unit_count, np.int64)
        for c, units in enumerate(geometry.class_units):
            found[units] = kept[c] + sum(len(index) for of, index in self.held if of == c)
        return found + (self.compact.pages if self.compact else 0)

    def _kept_pages(self) -> IntArray:
        """[C] pages within the sinks and the window of each class."""
        count = len(self.pages)
        low = np.maximum(self.first, self.sinks)
        holes = np.maximum(self.hole[:, 1] - np.maximum(self.hole[:, 0], low), 0)
        return np.minimum(self.sinks, count) + np.maximum(count - low, 0) - holes

    def covers(self, c: int, index: IntArray) -> np.ndarray:
        """Which page indices lie within the sinks or the window of class c, and are in memory."""
        start, stop = self.hole[c]
        inside = (index < self.sinks[c]) | (index >= self.first[c])
        return inside & ((index < start) | (index >= stop))

    def covered_head_pages(self, geometry: Geometry) -> IntArray:
        """[R] head-pages that the request covers now, shared ones included."""
        pages = self._kept_pages()
        for c, index in self.held:
            pages[c] += len(index)
        covered = pages @ geometry.class_ranks
        return covered if self.compact is None else covered + self.compact.head_pages_by_rank
