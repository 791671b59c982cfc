"""SGLang's paged allocator, unchanged for logical token ids, with head-pages given and taken beside them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from kvir.lowering import footprint
from kvir.lowering.tensor_parallel import rank_layouts
from kvir.sglang_ext.accounting import violations
from kvir.sglang_ext.admission import KvirPrefillBudget
from kvir.sglang_ext.compact import Compact
from kvir.sglang_ext.evidence import Evidence
from kvir.sglang_ext.folding import Chosen, Selections
from kvir.sglang_ext.geometry import IntArray
from kvir.sglang_ext.growth import Growth
from kvir.sglang_ext.requests import BRANCH_PAGE, Landmarks, RequestState

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from kvir.sglang_ext.pool import KvirPool
    from kvir.sglang_ext.prefix import KvirRadixCache

logger = logging.getLogger(__name__)


class KvirAllocator(PagedTokenToKVPoolAllocator):
    """`available_size()` stays logical (SGLang's leak checker adds it up); physical limits are enforced in
    the capacity questions: `check_decode_capacity`, the prefill budget, `max_new_tokens_for_memory`.
    """

    def __init__(
        self,
        size: int,
        dtype: torch.dtype,
        device: str,
        pool: KvirPool,
        *,
        need_sort: bool,
        debug: bool,
        chunk_tokens: int,
    ) -> None:
        self.chunk_tokens = chunk_tokens  # the most tokens of one prompt in one extend
        self.pool = pool
        self.residency = pool.residency
        self.layout = pool.plan.layout
        self.evidence = Evidence(pool)
        self.debug = debug
        self.ranks = pool.residency.geometry.ranks
        self.selections = Selections(self.layout, self.ranks)
        self._rank_layouts = rank_layouts(self.layout, self.ranks.count)
        self.compacting: list[Compact | None] = []  # of the step scheduled last, in batch order
        self.tree: KvirRadixCache | None = None
        self.extending: list[tuple[RequestState, int, int]] = []
        self.decoding: list[RequestState] = []
        self._verified_version = -1
        if debug:
            self.residency.pool.freed_log = []
        super().__init__(size, self.layout.page_tokens, dtype, device, pool, need_sort)

    def clear(self) -> None:
        super().clear()
        self.pool.reset_residency()
        self.residency.pool.freed_log = [] if self.debug else None

    # ---- before an allocation: requests open, windows slide ------------------------------------------------

    def prepare(self, batch: ScheduleBatch) -> None:
        """Called from the hook on `ScheduleBatch.maybe_evict_swa`, the only place before an allocation that
        knows the requests.
        """
        res = self.residency
        self.tree = batch.tree_cache  # type: ignore[assignment]
        if batch.forward_mode.is_decode():
            res.begin_step(extend=False)
            self.decoding = [res.requests[id(req.kv)] for req in batch.reqs]
            for state, req in zip(self.decoding, batch.reqs, strict=True):
                res.slide(state, req.kv.kv_committed_len, decoding=True)
            return
        res.begin_step(extend=True)
        self.extending = []
        for req, start, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            state = res.requests.get(id(req.kv))
            if state is None:
                state = self._open(req, start)
            self.extending.append((state, start, start + length))
        for position, (state, start, _) in enumerate(self.extending):
            if start % self.page_size:
                res.note_partial_page(position, state, start)
        for state, _, end in self.extending:
            res.slide(state, end)

    def _open(self, req: Req, prefix_tokens: int) -> RequestState:
        pages: list[int] = []
        if prefix_tokens:
            if self.tree is None:
                raise RuntimeError("kvir: a matched prefix without a tree")
            ids = self.tree.prefix_device_indices(req)[: prefix_tokens : self.page_size]
            pages = (ids // self.page_size).tolist()
        prompt_tokens = len(req.full_untruncated_fill_ids)
        branch = getattr(req, BRANCH_PAGE, None)
        landmarks = Landmarks(
            prompt_page=prompt_tokens // self.page_size,
            branch_page=branch if branch is not None and branch > len(pages) else None,
            matched_page=len(pages),
        )
        publishes = not getattr(req, "skip_radix_cache_insert", False)
        state = self.residency.open(req.kv, pages, prefix_tokens, landmarks, publishes=publishes)
        state.prompt_tokens = prompt_tokens
        state.max_new_tokens = max(0, (req.sampling_params.max_new_tokens or 0) - len(req.output_ids))
        final = prompt_tokens + state.max_new_tokens
        state.peak_pages = self.peak_pages(final, prompt_tokens)
        growth = [footprint.growth_peak_pages(each, final, prompt_tokens) for each in self._rank_layouts]
        state.growth_peak_pages = np.array(growth)
        state.rid = req.rid
        state.retractions = req.retraction_count
        state.cached_tokens = prefix_tokens
        state.selects = self.selections.runs(prompt_tokens)
        # a prompt that drops rows later may have published more
        state.published_tokens = max(prefix_tokens, self.selections.publishes(prompt_tokens))
        state.first_drop_tokens = self.selections.first_drop(prompt_tokens)
        return state

    # ---- allocation ----------------------------------------------------------------------------------------

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        res = self.residency
        if [end for _, _, end in self.extending] != seq_lens_cpu.tolist():
            raise RuntimeError("kvir: the batch being allocated is not the batch that was prepared")
        folds = [self.selections.in_prefill(state, end) for state, _, end in self.extending]
        # windows before branch points are worth having, not worth evicting running work for
        hold_branch = any(state.landmarks.branch_page is not None for state, _, _ in self.extending)
        growths = self._growths(folds, hold_branch=hold_branch)
        if hold_branch:
            needed = self._needed(growths, folds)
            hold_branch = res.make_room_for_extend(needed, None, interior_only=True)
            if not hold_branch:
                growths = self._growths(folds, hold_branch=False)
        if not hold_branch and not res.make_room_for_extend(self._needed(growths, folds), self.tree):
            logger.error("kvir: no room for a prefill chunk: %s", self.evidence.pool_line())
            return None
        out = super().alloc_extend(
            prefix_lens,
            prefix_lens_cpu,
            seq_lens,
            seq_lens_cpu,
            last_loc,
            extend_num_tokens,
            num_new_pages,  # pyright: ignore[reportArgumentType]  SGLang declares `int = None`
        )
        if out is None:
            return None
        done = 0
        for (_, start, end), growth in zip(self.extending, growths, strict=True):
            first_new = -(-start // self.page_size) * self.page_size
            ids = out[done + first_new - start : done + end - start : self.page_size]
            res.grow(growth, (ids // self.page_size).tolist())
            done += end - start
        states = [state for state, _, _ in self.extending]
        self.compacting = [res.compacts.reserve(*each) for each in zip(states, folds, strict=True)]
        self._end_step()
        return out

    def _growths(self, folds: Sequence[Chosen | None], *, hold_branch: bool) -> list[Growth]:
        return [
            self.residency.growth(state, end, fold, hold_branch=hold_branch)
            for (state, _, end), fold in zip(self.extending, folds, strict=True)
        ]

    def _needed(self, growths: Sequence[Growth], folds: Sequence[Chosen | None]) -> IntArray:
        total = np.zeros(self.residency.geometry.lane_count, np.int64)
        for (state, _, _), growth, fold in zip(self.extending, growths, folds, strict=True):
            total += growth.needed()
            if fold is not None:
                total += self.residency.compacts.needed_by_lane(state, fold)
        return total

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        res = self.residency
        lens: list[int] = seq_lens_cpu.tolist()
        opening = [i for i, n in enumerate(lens) if n % self.page_size == 1]
        folds = [self.selections.while_decoding(*each) for each in zip(self.decoding, lens, strict=True)]
        needed = len(opening) * res.geometry.rank_units + res.compacts.needed(self.decoding, folds)
        if needed.any() and not res.reclaimer.make_room(needed, self.tree):
            logger.error("kvir: no room for a decode step: %s", self.evidence.pool_line())
            return None
        out = super().alloc_decode(seq_lens, seq_lens_cpu, last_loc)
        if out is None:
            return None
        for i in opening:
            growth = res.growth(self.decoding[i], lens[i], hold_branch=False)
            res.grow(growth, [int(out[i]) // self.page_size])
        self.compacting = [res.compacts.reserve(*each) for each in zip(self.decoding, folds, strict=True)]
        self._end_step()
        return out

    def _end_step(self) -> None:
        self.residency.end_step()
        if self.debug:
            self._check()

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        """The one choke point of every logical free."""
        super()._release_page_ids(*page_ids)
        for ids in page_ids:
            self.residency.release(ids.cpu().numpy().astype(np.int64))

    # ---- capacity questions --------------------------------------------------------------------------------

    def peak_pages(self, tokens: int, prompt_tokens: int) -> IntArray:
        """[R] the most head-pages that a request needs on its way to `tokens` tokens."""
        chunk, layouts = self.chunk_tokens, self._rank_layouts
        return np.array([footprint.peak_pages(each, tokens, prompt_tokens, chunk) for each in layouts])

    def _fits(self, tokens: int, prompt_tokens: int) -> bool:
        """Whether the empty pool could hold a request."""
        return bool((self.peak_pages(tokens, prompt_tokens) <= self.pool.head_page_count).all())

    def create_prefill_budget(
        self, tree_cache: KvirRadixCache, *, num_mixed_decode_tokens: int = 0
    ) -> KvirPrefillBudget:
        self.tree = tree_cache
        return KvirPrefillBudget(self, tree_cache, num_mixed_decode_tokens=num_mixed_decode_tokens)

    def check_decode_capacity(
        self,
        *,
        num_tokens: int,
        tree_cache: KvirRadixCache,
        requests: list[Req] | None = None,
        spec_algorithm: object = None,
    ) -> bool:
        """False makes SGLang's own retraction run; it converges on this same question."""
        logical = super().check_decode_capacity(num_tokens=num_tokens, tree_cache=tree_cache)
        res = self.residency
        res.begin_step(extend=False)
        opening = 0
        states: list[RequestState] = []
        folds: list[Chosen | None] = []
        for req in requests or []:
            length = req.kv.kv_committed_len
            states.append(res.requests[id(req.kv)])
            res.slide(states[-1], length, decoding=True)
            opening += length % self.page_size == 0
            folds.append(self.selections.while_decoding(states[-1], length + 1))
        needed = opening * res.geometry.rank_units + res.compacts.needed(states, folds)
        physical = res.reclaimer.make_room(needed, tree_cache)
        if not physical:
            res.counters["decode_shortfalls"] += 1
        return logical and physical

    def max_new_tokens_for_memory(
        self, input_tokens: int, max_new_tokens: int, **kwargs: object
    ) -> int | None:
        """Clip a generation to what the empty pool could hold; None refuses the prompt."""
        logical = super().max_new_tokens_for_memory(input_tokens, max_new_tokens, **kwargs)  # type: ignore[arg-type]
        if logical is None or not self._fits(input_tokens + 1, input_tokens):
            return None
        fits, too_many = 0, logical + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self._fits(input_tokens + middle, input_tokens):
                fits = middle
            else:
                too_many = middle
        return fits

    # ---- checks --------------------------------------------------------------------------------------------

    def verify_byte_accounting(self) -> list[str]:
        """SGLang asks at every idle turn of its loop: recount only when something changed."""
        res = self.residency
        if res.version == self._verified_version:
            return []
        self._verified_version = res.version
        self.evidence.push_metrics()
        return violations(self)

    def _check(self) -> None:
        found = violations(self)
        if found:
            raise RuntimeError("kvir: conservation broken: " + "; ".join(found))
