"""Admission by footprint: SGLang's token budget for logical ids, and head-pages beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from sglang.srt.mem_cache.prefill_budget import PrefillBudget

from kvir.sglang_ext.geometry import IntArray

if TYPE_CHECKING:
    from kvir.sglang_ext.allocator import KvirAllocator
    from kvir.sglang_ext.prefix import KvirRadixCache


class KvirPrefillBudget(PrefillBudget):
    """One prefill pass.

    Available = free + quarantined + idle head-pages, less the growth still owed to running requests.  A
    request's own idle prefix counts in what is available and in what it needs, so nothing is counted twice.
    Growth of a request still in prefill is owed in full; while decoding, in the ratio that SGLang itself
    expects of generations (`new_token_ratio`).
    """

    def __init__(self, allocator: KvirAllocator, tree_cache: KvirRadixCache, **kwargs: Any) -> None:
        super().__init__(allocator, tree_cache, **kwargs)
        self._allocator = allocator
        self._residency = allocator.residency
        self._layout = allocator.layout
        self.new_token_ratio = 1.0  # set by the hook on PrefillAdder.add_one_req
        # all [R]; credit: head-pages of the candidate's prefix that other requests hold anyway
        self.no_head_pages: IntArray = np.zeros(allocator.ranks.count, np.int64)
        self.credit_head_pages = self._candidate = self._admitted = self.no_head_pages

    def _owed(self) -> IntArray:
        total = np.zeros(self._allocator.ranks.count, np.int64)
        for state in self._residency.requests.values():
            in_prefill = len(state.pages) * self._layout.page_tokens < state.prompt_tokens
            final = state.peak_pages if in_prefill else state.growth_peak_pages
            growth = np.maximum(final - self._residency.covered_by(state), 0)
            total += growth if in_prefill else (growth * self.new_token_ratio).astype(np.int64)
        return total

    @property
    def remaining_head_pages(self) -> IntArray:
        """[R]"""
        return self._residency.available - self._owed() - self._admitted

    def has_capacity(self) -> bool:
        return super().has_capacity() and bool((self.remaining_head_pages > 0).all())

    def check_prefill(
        self, *, extend_input_len: int, max_new_tokens: int, input_tokens: int, **kwargs: Any
    ) -> tuple[bool, int | None]:
        ok, limit = super().check_prefill(
            extend_input_len=extend_input_len,
            max_new_tokens=max_new_tokens,
            input_tokens=input_tokens,
            **kwargs,
        )
        final = self._allocator.peak_pages(input_tokens + max_new_tokens, input_tokens)
        self._candidate = final - self.credit_head_pages
        if ok and (self._candidate > self.remaining_head_pages).any():
            self._residency.counters["admissions_deferred"] += 1
            return False, None
        return ok, limit

    def can_allocate_prefill(self, **kwargs: Any) -> bool:
        raise NotImplementedError("kvir: admission without a prefix tree is refused at start")

    def reserve(self, *args: Any, is_chunked_continuation: bool = False, **kwargs: Any) -> None:
        super().reserve(*args, is_chunked_continuation=is_chunked_continuation, **kwargs)
        if not is_chunked_continuation:
            self._admitted = self._admitted + self._candidate
            self._candidate = self.no_head_pages


def shared_credit(budget: KvirPrefillBudget, pages: IntArray) -> IntArray:
    """[R] head-pages of a matched prefix (`pages`: its logical pages) that running requests cover and that
    the candidate needs to its end too: those of full classes, and sinks.
    """
    res = budget._residency
    geo = res.geometry
    total = np.zeros(geo.ranks.count, np.int64)
    for c in range(geo.class_count):
        kept = pages if geo.is_full(c) else pages[: geo.prefill.sink_pages[c]]
        total += int((res.cover[kept, c] > 0).sum()) * geo.class_ranks[c]
    return total
