"""SGLang's prefix tree with the three things it cannot know: which prefixes are still whole, what a duplicate
heals, and when a request's residency ends.  The tree core (Rust) is untouched; everything here wraps public
methods.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    MatchPrefixParams,
    MatchResult,
    zero_match_result,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvir.sglang_ext.geometry import IntArray
from kvir.sglang_ext.requests import BRANCH_PAGE

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from kvir.sglang_ext.allocator import KvirAllocator
    from kvir.sglang_ext.residency import Residency


class KvirRadixCache(UnifiedRadixCache):
    @property
    def kvir_allocator(self) -> KvirAllocator:
        return cast("KvirAllocator", self.token_to_kv_pool_allocator)

    @property
    def residency(self) -> Residency:
        return self.kvir_allocator.residency

    def _match_tree(self, params: MatchPrefixParams) -> MatchResult:
        """The longest page-aligned prefix whose rows are all there: sinks, full classes, and one whole window
        per class.
        """
        result = super()._match_tree(params)
        if not result.device_prefix_len:
            return result
        page = self.page_size
        ids = self.path_device_indices(result.last_device_node)[: result.device_prefix_len : page]
        pages = (ids // page).cpu().numpy()
        valid = valid_pages(self.residency, pages)
        if valid == len(pages):
            return result
        self.residency.counters["matches_shortened"] += 1
        if params.req is not None:
            # another prompt shares this far, but the windows are gone: keep the ones before here this time
            setattr(params.req, BRANCH_PAGE, len(pages))
        key = params.key
        if valid == 0:
            return zero_match_result(self, result, extra_key=key.extra_key)
        shorter = RadixKey(
            key.token_ids, key.extra_key, key.is_bigram, limit=valid * page, cache_salt=key.cache_salt
        )
        result = super()._match_tree(dataclasses.replace(params, key=shorter))
        if result.device_prefix_len != valid * page:
            raise RuntimeError(
                f"kvir: asked for a prefix of {valid * page} tokens, got {result.device_prefix_len}"
            )
        return result

    def checkpoint_into_tree(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        res = self.residency
        state = res.requests.get(id(req.kv))
        if state is not None and res.geometry.phased:
            # rows of later tokens depend on what was dropped
            up_to = min(up_to, state.published_tokens)
        res.hold_frees()
        try:
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
            if state is not None:
                row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
                canonical = row[: req.kv.cache_protected_len : self.page_size] // self.page_size
                res.adopt(state, canonical.tolist())
        finally:
            res.resume_frees()

    def free_kv_row(self, kv: Any, ranges: list[tuple[int, int]]) -> None:
        """Finish, abort and retraction all pass here."""
        self.kvir_allocator.evidence.note_end(self.residency.requests.get(id(kv)))
        self.residency.close(kv)
        super().free_kv_row(kv, ranges)

    def evict_pages(self, pages: int) -> int:
        evicted = self.evict(EvictParams(num_tokens=pages * self.page_size)).num_tokens_evicted
        return evicted // self.page_size


def valid_pages(res: Residency, pages: IntArray) -> int:
    """Length in pages of the longest prefix of `pages` that a request may start from."""
    geo = res.geometry
    count = len(pages)
    lengths = np.arange(count + 1)
    ok = np.ones(count + 1, bool)
    for c in range(geo.class_count):
        alive = res.alive[pages, c]
        sinks = int(geo.prefill.sink_pages[c])
        # alive run that ends right before page m, for every m
        last_dead = np.maximum.accumulate(np.where(alive, -1, np.arange(count)))
        run = np.concatenate([[0], np.arange(count) - last_dead])
        wanted = np.minimum(np.maximum(lengths - sinks, 0), geo.prefill.window_pages[c])
        ok &= run >= wanted
        if sinks:
            whole_sinks = bool(alive[:sinks].all())
            # a match that ends inside the sinks saves nothing and splits a node
            ok &= (lengths == 0) | ((lengths >= sinks) if whole_sinks else False)
    return int(np.nonzero(ok)[0].max())
