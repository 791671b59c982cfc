"""Which pages of a growing request get head-pages: what survives its own chunk, and what a branch needs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvir.sglang_ext.folding import BoolArray, Chosen
from kvir.sglang_ext.geometry import Geometry, IntArray
from kvir.sglang_ext.requests import RequestState


class Growth:
    """A request grows to `tokens` tokens; `chosen` is what is selected in this chunk."""

    def __init__(
        self,
        geometry: Geometry,
        state: RequestState,
        tokens: int,
        chosen: Chosen | None,
        *,
        hold_branch: bool,
    ) -> None:
        self.state, self.tokens = state, tokens
        self._geometry, self._chosen, self._hold_branch = geometry, chosen, hold_branch
        self.index = np.arange(len(state.pages), geometry.pages_of(tokens))  # of the new pages
        self.first: IntArray = geometry.spans(state.decoding).first_page(tokens // geometry.page_tokens)

    def classes(self) -> Iterator[tuple[int, BoolArray, BoolArray]]:
        """(class, which of the new pages it keeps, which it holds besides for another prompt)."""
        state, index = self.state, self.index
        for c in range(self._geometry.class_count):
            start, stop = self.passing(c)
            dense = (index < start) | (index >= stop)
            window = index >= max(int(self.first[c]), int(state.first[c]))
            keep = dense & ((index < state.sinks[c]) | window)
            held = np.zeros(len(index), bool)
            if self._hold_branch:
                window_pages = int(self._geometry.prefill.window_pages[c])
                held = dense & ~keep & state.landmarks.before_branch(index, window_pages)
            yield c, keep, held

    def passing(self, c: int) -> tuple[int, int]:
        """New pages [start, stop) whose rows go from the chunk to the copy of a selection: dense, they would
        never be read."""
        unit, page_tokens = int(self._geometry.class_leaders[c]), self._geometry.page_tokens
        if self._chosen is None or not self._chosen.passes[unit]:
            return 0, 0
        start = max(len(self.state.pages), -(-self.state.published_tokens // page_tokens))
        stop = int(self._chosen.at[unit] - self._chosen.left[unit]) // page_tokens
        return (start, stop) if start < stop else (0, 0)

    def needed(self) -> IntArray:
        """[lanes] head-pages that this takes."""
        pages = np.zeros(self._geometry.class_count, np.int64)
        for c, keep, held in self.classes():
            pages[c] = int((keep | held).sum())
        return pages @ self._geometry.lane_units
