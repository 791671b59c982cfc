"""Requests and their pages over time: windows slide, prompts grow, the tree takes over, requests end.

One scheduling step is `begin_step`, then `open` / `slide` for every request of the batch, then room is made
and `grow` gives head-pages to what survives, then `end_step`.  Private cells never stay idle: at cover 0 they
are dropped at once; cells of the prefix tree are kept as cache until memory is needed (`reclaim`).
"""

from __future__ import annotations

import numpy as np

from kvir.sglang_ext.cells import Cells
from kvir.sglang_ext.compact_store import CompactStore
from kvir.sglang_ext.folding import Chosen
from kvir.sglang_ext.geometry import Geometry, IntArray
from kvir.sglang_ext.growth import Growth
from kvir.sglang_ext.reclaim import Entry, EvictableTree, Reclaimer
from kvir.sglang_ext.requests import Landmarks, RequestState


class Residency(Cells):
    """The whole bookkeeping of one pool."""

    def __init__(
        self,
        geometry: Geometry,
        page_count: int,
        head_page_count: int,
        *,
        spare_base: int = 0,
        spare_count: int = 0,
    ) -> None:
        self.reclaimer = Reclaimer(self)
        self.compacts = CompactStore(self, spare_base, spare_count)
        super().__init__(geometry, page_count, head_page_count)

    def reset(self) -> None:
        super().reset()
        self.reclaimer.clear()
        self.compacts.clear()
        self.requests: dict[int, RequestState] = {}
        self.peak_resident = self.peak_requests = 0
        self.peak_covered = 0
        self.peak_pages_in_use = 0
        self._in_extend = False  # below: queued at the next step, for this one still reads them
        self._slid_now: list[tuple[list[Entry], bool]] = []

    # ---- one scheduling step -------------------------------------------------------------------------------

    def begin_step(self, *, extend: bool) -> None:
        """Scheduling of the next forward begins; the one before it was launched."""
        self.pool.drain()
        self.compacts.settle()
        for entries, tail in self._slid_now:
            self.reclaimer.add(entries, tail=tail)
            for page, c, _ in entries:
                self.still_read[page, c] = False
        self._slid_now = []
        self.partial_pages.clear()
        self._in_extend = extend

    def end_step(self) -> None:
        self._in_extend = False
        self.version += 1
        self.peak_resident = max(self.peak_resident, int(self.pool.resident.sum()))
        self.peak_covered = max(self.peak_covered, int(self.covered_head_pages.sum()))
        self.peak_pages_in_use = max(self.peak_pages_in_use, self.pages_in_use)
        self.peak_requests = max(self.peak_requests, len(self.requests))

    def note_partial_page(self, position: int, state: RequestState, prefix_tokens: int) -> None:
        """The extend at batch position `position` begins inside a page: its old row is read by a shadow."""
        page = state.pages[prefix_tokens // self.geometry.page_tokens]
        self.partial_pages.add(page)
        self.deltas.push_shadow(position, self.table[page].copy())

    def _uncover(self, state: RequestState, index: IntArray, c: int, *, closing: bool = False) -> None:
        """The request's pages at `index` leave class c's window, or the request ends."""
        if state.decoding and state.publishes and not closing:
            # the prompt's pages are the tree's to keep, but the step before is not processed yet
            published = state.published_tokens // self.geometry.page_tokens
            waiting = (index >= state.tree_pages) & (index < published)
            if waiting.any():
                state.held.append((c, index[waiting]))
                index = index[~waiting]
        if not len(index):
            return
        pages = np.array(state.pages, np.int64)[index]
        if not (self.cover[pages, c] > 0).all():
            raise RuntimeError("kvir: a page is uncovered twice")
        self.cover[pages, c] -= 1
        idle = self.cover[pages, c] == 0
        size = self.geometry.class_ranks[c]  # [R]
        self.idle_head_pages += int(idle.sum()) * size
        if closing:
            return  # the tree keeps what it owns as cache; the rest is released with its logical pages
        private = idle & (index >= state.tree_pages)
        if private.any():
            self.idle_head_pages -= int(private.sum()) * size
            self.drop(pages[private], c, still_read=self._in_extend)
            self.counters["slid_private"] += int(private.sum())
        owned = idle & ~private
        if owned.any():
            self.counters["slid_tree"] += int(owned.sum())
            if self.geometry.is_full(c):
                # a hole makes what follows it worthless as a prefix: so from the end
                self._enqueue(pages[owned][::-1], c, tail=False)
                return
            tail = owned & state.landmarks.in_tail(index, int(self.geometry.prefill.window_pages[c]))
            self._enqueue(pages[owned & ~tail], c, tail=False)
            self._enqueue(pages[tail], c, tail=True)

    def _enqueue(self, pages: IntArray, c: int, *, tail: bool) -> None:
        if not len(pages):
            return
        entries = [(p, c, e) for p, e in zip(pages.tolist(), self.epoch[pages, c].tolist(), strict=True)]
        if self._in_extend:
            self.still_read[pages, c] = True
            self._slid_now.append((entries, tail))
        else:
            self.reclaimer.add(entries, tail=tail)

    # ---- requests ------------------------------------------------------------------------------------------

    def open(
        self, kv: object, pages: list[int], tokens: int, landmarks: Landmarks, *, publishes: bool = True
    ) -> RequestState:
        """A request starts with a matched prefix of `tokens` tokens in `pages`, all owned by the tree."""
        spans = self.geometry.prefill
        floor = tokens // self.geometry.page_tokens
        state = RequestState(
            kv=kv,
            pages=list(pages),
            tree_pages=len(pages),
            landmarks=landmarks,
            sinks=spans.sink_pages.copy(),
            first=np.minimum(spans.first_page(floor), np.maximum(len(pages), spans.sink_pages)),
            hole=np.zeros((self.geometry.class_count, 2), np.int64),
            page_floor=floor,
            publishes=publishes,
        )
        all_pages = np.array(pages, np.int64)
        self.read(all_pages)
        for c in range(self.geometry.class_count):
            self.add_cover(all_pages[: state.sinks[c]], c)
            self.add_cover(all_pages[state.first[c] :], c)
        self.requests[id(kv)] = state
        return state

    def slide(self, state: RequestState, tokens: int, *, decoding: bool = False) -> None:
        """The request's next query is past `tokens` tokens: windows move on, and may narrow when decoding
        begins.
        """
        turning = decoding and self.geometry.phased and not state.decoding
        floor, compact = tokens // self.geometry.page_tokens, state.compact
        if floor <= state.page_floor and not turning and not (compact and compact.slides):
            return
        state.page_floor = max(floor, state.page_floor)
        state.decoding |= turning
        spans = self.geometry.spans(state.decoding)
        first = spans.first_page(floor)
        if compact is not None:
            leaders = self.geometry.class_leaders
            first = np.where(compact.moved[leaders], compact.start_page[leaders], first)
            compact.slides = False
        first = np.minimum(first, np.maximum(len(state.pages), spans.sink_pages))
        for c in np.nonzero((first > state.first) | (spans.sink_pages < state.sinks))[0].tolist():
            sinks, end = int(spans.sink_pages[c]), min(int(first[c]), len(state.pages))
            index = np.arange(sinks if turning else int(state.first[c]), end)
            index = index[state.covers(c, index)]
            state.sinks[c], state.first[c] = sinks, first[c]
            self._uncover(state, index, c)

    def growth(
        self, state: RequestState, tokens: int, chosen: Chosen | None = None, *, hold_branch: bool
    ) -> Growth:
        """How the request grows to `tokens` tokens, when rows are `chosen` at once."""
        return Growth(self.geometry, state, tokens, chosen, hold_branch=hold_branch)

    def grow(self, growth: Growth, new_pages: list[int]) -> None:
        """The request has grown into `new_pages`; those that it needs get head-pages."""
        geo, state, index = self.geometry, growth.state, growth.index
        pages = np.array(new_pages, np.int64)
        if self.alive[pages].any() or self.cover[pages].any():
            raise RuntimeError("kvir: a fresh logical page is resident already")
        self.read(pages)
        for c, keep, held in growth.classes():
            filled = keep | held
            self.counters["rows_never_written"] += (len(index) - int(filled.sum())) * len(geo.class_units[c])
            if filled.any():
                self.fill(pages[filled], c)
                self.is_sink[pages[index < geo.prefill.sink_pages[c]], c] = True
            if held.any():
                state.held.append((c, index[held]))
            start, stop = growth.passing(c)
            if start < stop:
                state.hole[c] = start, stop
        state.pages.extend(new_pages)
        after = np.minimum(growth.first, np.maximum(len(state.pages), state.sinks))
        state.first = np.maximum(state.first, after)
        state.page_floor = max(state.page_floor, growth.tokens // geo.page_tokens)
        if len(pages):
            self.push_rows(pages)

    def release_held(self, state: RequestState) -> None:
        """Pages that were held for the tree, which owns them by now, become idle cache."""
        held, state.held = state.held, []
        for c, index in held:
            owned = index < state.tree_pages
            self._uncover(state, index[owned], c)
            if not owned.all():
                state.held.append((c, index[~owned]))

    def close(self, kv: object) -> None:
        """The request ends, for whatever reason: nothing of it is covered any more."""
        state = self.requests.pop(id(kv), None)
        if state is None:
            return
        count = len(state.pages)
        for c in range(self.geometry.class_count):
            index = np.arange(count)
            self._uncover(state, index[state.covers(c, index)], c, closing=True)
        for c, index in state.held:
            self._uncover(state, index, c, closing=True)
        state.held = []
        self.compacts.release(state)
        self.unread(np.array(state.pages, np.int64))
        self.version += 1

    def covered_by(self, state: RequestState) -> IntArray:
        """[R] head-pages that the request covers now (shared ones included)."""
        return state.covered_head_pages(self.geometry)

    # ---- the tree takes pages over -------------------------------------------------------------------------

    def adopt(self, state: RequestState, canonical: list[int]) -> None:
        """The tree owns the request's first len(canonical) pages now, under these ids.

        Where an id changed, the request's page is a duplicate of the tree's: covers move over, and a hole of
        the tree is healed by moving the pointers of the duplicate's head-pages.
        """
        geo = self.geometry
        lo, hi = state.tree_pages, len(canonical)
        mine = np.array(state.pages[lo:hi], np.int64)
        theirs = np.array(canonical[lo:hi], np.int64)
        changed = np.nonzero(mine != theirs)[0]
        state.pages[lo:hi] = canonical[lo:hi]
        state.tree_pages = max(state.tree_pages, hi)
        if len(changed):
            a, b, index = mine[changed], theirs[changed], lo + changed
            self.counters["duplicate_pages"] += len(changed)
            self.unread(a)
            self.read(b)
            for c in range(geo.class_count):
                covered = state.covers(c, index)
                for held_class, held_index in state.held:
                    if held_class == c:
                        covered |= np.isin(index, held_index)
                self.move(a, b, index, covered, c)
            self.push_rows(np.concatenate([a, b]))
            self.compacts.refresh_sinks(state)
        self.release_held(state)
        self.version += 1

    # ---- making room ---------------------------------------------------------------------------------------

    def make_room_for_extend(
        self, needed: IntArray, tree: EvictableTree | None, *, interior_only: bool = False
    ) -> bool:
        """For an extend that allocates needed[lane] head-pages; what just slid out helps its own lane."""

        def short() -> IntArray:
            return self.geometry.by_rank(np.maximum(needed - self.pool.quarantined_by_lane(), 0))

        ok = self.reclaimer.make_room(short(), tree, interior_only=interior_only)
        # last resort: tree pages that slid out just now are read still, but may serve their layer
        while not ok and not interior_only and self._slid_now:
            entries, _ = self._slid_now.pop(0)
            for page, c, epoch in entries:
                self.still_read[page, c] = False
                if self.epoch[page, c] == epoch and self.is_reclaimable(page, c):
                    self.idle_head_pages -= self.geometry.class_ranks[c]
                    self.drop(np.array([page]), c, still_read=True)
                    self.counters["tombstoned_at_once"] += 1
            ok = not self.reclaimer.is_short(short())
        return ok
