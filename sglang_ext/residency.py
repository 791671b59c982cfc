"""Requests and their pages over time: windows slide, prompts grow, the tree takes over, requests end.

One scheduling step is `begin_step`, then `open` / `slide` for every request of the batch, then room is made
and `grow` gives head-pages to what survives, then `end_step`.  Private cells never stay idle: at cover 0 they
are dropped at once; cells of the prefix tree are kept as cache until memory is needed (`reclaim`).
"""

from __future__ import annotations

import numpy as np

from kvir.sglang_ext.cells import Cells
from kvir.sglang_ext.geometry import Geometry, IntArray
from kvir.sglang_ext.reclaim import Entry, EvictableTree, Reclaimer, missing_per_layer
from kvir.sglang_ext.requests import Landmarks, RequestState


class Residency(Cells):
    """The whole bookkeeping of one pool."""

    def __init__(self, geometry: Geometry, page_count: int, head_page_count: int) -> None:
        self.reclaimer = Reclaimer(self)
        super().__init__(geometry, page_count, head_page_count)

    def reset(self) -> None:
        super().reset()
        self.reclaimer.clear()
        self.requests: dict[int, RequestState] = {}
        self.peak_resident = 0
        self.peak_covered = 0
        self.peak_pages_in_use = 0
        self.version = 0  # of everything that the accounting depends on
        self._in_extend = False
        self._slid_now: list[
            tuple[list[Entry], bool]
        ] = []  # queued at the next step: this one still reads them
        self._held_frees: list[IntArray] | None = None

    # ---- one scheduling step -------------------------------------------------------------------------------

    def begin_step(self, *, extend: bool) -> None:
        """Scheduling of the next forward begins; the one before it was launched."""
        self.pool.drain()
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
        self.peak_resident = max(self.peak_resident, self.pool.resident)
        self.peak_covered = max(self.peak_covered, self.covered_head_pages)
        self.peak_pages_in_use = max(self.peak_pages_in_use, self.pages_in_use)

    def note_partial_page(self, position: int, state: RequestState, prefix_tokens: int) -> None:
        """The extend at batch position `position` begins inside a page: its old row is read by a shadow."""
        page = state.pages[prefix_tokens // self.geometry.page_tokens]
        self.partial_pages.add(page)
        self.deltas.push_shadow(position, self.table[page].copy())

    def _remove_cover(
        self, state: RequestState, first: int, end: int, c: int, *, closing: bool = False
    ) -> None:
        """Pages [first, end) of the request leave class c's window, or the request ends."""
        if end <= first:
            return
        pages = np.array(state.pages[first:end], np.int64)
        if not (self.cover[pages, c] > 0).all():
            raise RuntimeError("kvir: a page is uncovered twice")
        self.cover[pages, c] -= 1
        idle = self.cover[pages, c] == 0
        size = int(self.geometry.class_size[c])
        self.idle_head_pages += int(idle.sum()) * size
        if closing:
            return  # the tree keeps what it owns as cache; the rest is released with its logical pages
        index = np.arange(first, end)
        private = idle & (index >= state.tree_pages)
        if private.any():
            self.idle_head_pages -= int(private.sum()) * size
            self.drop(pages[private], c, still_read=self._in_extend)
            self.counters["slid_private"] += int(private.sum())
        owned = idle & ~private
        if owned.any():
            self.counters["slid_tree"] += int(owned.sum())
            window = int(self.geometry.window_pages[c])
            tail = owned & state.landmarks.in_tail(index, window)
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

    def open(self, kv: object, pages: list[int], tokens: int, landmarks: Landmarks) -> RequestState:
        """A request starts with a matched prefix of `tokens` tokens in `pages`, all owned by the tree."""
        geo = self.geometry
        state = RequestState(kv=kv, pages=list(pages), tree_pages=len(pages), landmarks=landmarks)
        sinks = geo.sink_pages
        state.first = np.minimum(
            np.maximum(geo.first_window_page(tokens), sinks), np.maximum(len(pages), sinks)
        )
        state.page_floor = tokens // geo.page_tokens
        all_pages = np.array(pages, np.int64)
        self.read(all_pages)
        for c in range(geo.class_count):
            self.add_cover(all_pages[: sinks[c]], c)
            self.add_cover(all_pages[state.first[c] :], c)
        self.requests[id(kv)] = state
        return state

    def slide(self, state: RequestState, tokens: int) -> None:
        """The request's next query is past `tokens` tokens: windows move on."""
        geo = self.geometry
        floor = tokens // geo.page_tokens
        if floor <= state.page_floor:
            return
        state.page_floor = floor
        first = np.minimum(
            np.maximum(geo.first_window_page(tokens), geo.sink_pages),
            np.maximum(len(state.pages), geo.sink_pages),
        )
        for c in np.nonzero(first > state.first)[0].tolist():
            self._remove_cover(state, int(state.first[c]), int(first[c]), c)
            state.first[c] = first[c]

    def _surviving(self, state: RequestState, c: int, index: IntArray, tokens: int) -> np.ndarray:
        """Which of the new page indices class c keeps when the request has grown to `tokens` tokens."""
        geo = self.geometry
        first = max(int(geo.first_window_page(tokens)[c]), int(geo.sink_pages[c]), int(state.first[c]))
        return (index < geo.sink_pages[c]) | (index >= first)

    def _held(self, state: RequestState, c: int, index: IntArray) -> np.ndarray:
        """Which of the new page indices form the window before the request's branch point."""
        return state.landmarks.before_branch(index, int(self.geometry.window_pages[c]))

    def needed_per_layer(self, state: RequestState, tokens: int, *, hold_branch: bool) -> IntArray:
        """[layers] head-pages that growing to `tokens` tokens allocates: only what survives its own chunk."""
        geo = self.geometry
        index = np.arange(len(state.pages), geo.pages_of(tokens))
        pages = np.zeros(geo.class_count, np.int64)
        for c in range(geo.class_count):
            keep = self._surviving(state, c, index, tokens)
            if hold_branch:
                keep = keep | self._held(state, c, index)
            pages[c] = int(keep.sum())
        return pages @ geo.layer_units

    def grow(self, state: RequestState, new_pages: list[int], tokens: int, *, hold_branch: bool) -> None:
        """The request has grown to `tokens` tokens in `new_pages`: give head-pages to what survives."""
        geo = self.geometry
        start = len(state.pages)
        state.pages.extend(new_pages)
        pages = np.array(new_pages, np.int64)
        index = np.arange(start, start + len(pages))
        if self.alive[pages].any() or self.cover[pages].any():
            raise RuntimeError("kvir: a fresh logical page is resident already")
        self.read(pages)
        for c in range(geo.class_count):
            keep = self._surviving(state, c, index, tokens)
            held = self._held(state, c, index) & ~keep if hold_branch else np.zeros(len(index), bool)
            chosen = keep | held
            self.counters["rows_never_written"] += (len(index) - int(chosen.sum())) * int(geo.class_size[c])
            if chosen.any():
                self.fill(pages[chosen], c)
                self.is_sink[pages[index < geo.sink_pages[c]], c] = True
            if held.any():
                state.held.append((c, index[held]))
            first = max(int(geo.first_window_page(tokens)[c]), int(geo.sink_pages[c]))
            state.first[c] = max(
                int(state.first[c]), min(first, max(len(state.pages), int(geo.sink_pages[c])))
            )
        state.page_floor = max(state.page_floor, tokens // geo.page_tokens)
        if len(pages):
            self.push_rows(pages)

    def release_held(self, state: RequestState) -> None:
        """Branch tails that the tree owns by now become idle cache."""
        keep: list[tuple[int, IntArray]] = []
        for c, index in state.held:
            owned = index[index < state.tree_pages]
            for i in owned.tolist():
                self._remove_cover(state, i, i + 1, c)
            if len(owned) < len(index):
                keep.append((c, index[index >= state.tree_pages]))
        state.held = keep

    def close(self, kv: object) -> None:
        """The request ends, for whatever reason: nothing of it is covered any more."""
        state = self.requests.pop(id(kv), None)
        if state is None:
            return
        count = len(state.pages)
        for c in range(self.geometry.class_count):
            sinks = int(self.geometry.sink_pages[c])
            self._remove_cover(state, 0, min(sinks, count), c, closing=True)
            self._remove_cover(state, int(state.first[c]), count, c, closing=True)
        for c, index in state.held:
            for i in index.tolist():
                self._remove_cover(state, i, i + 1, c, closing=True)
        state.held = []
        self.unread(np.array(state.pages, np.int64))
        self.version += 1

    def covered_by(self, state: RequestState) -> int:
        """Head-pages that the request covers now (shared ones included)."""
        held = sum(len(index) * int(self.geometry.class_size[c]) for c, index in state.held)
        window = self.geometry.held_pages(state.first, len(state.pages)) @ self.geometry.class_size
        return int(window) + held

    # ---- the tree takes pages over -------------------------------------------------------------------------

    def hold_frees(self) -> None:
        """While the tree inserts, logical frees of duplicates wait: their rows may heal the tree."""
        self._held_frees = []

    def resume_frees(self) -> None:
        waiting, self._held_frees = self._held_frees, None
        for pages in waiting or []:
            self.release(pages)

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
                covered = (index < geo.sink_pages[c]) | (index >= state.first[c])
                for held_class, held_index in state.held:
                    if held_class == c:
                        covered |= np.isin(index, held_index)
                self.move(a, b, index, covered, c)
            self.push_rows(np.concatenate([a, b]))
        self.release_held(state)
        self.version += 1

    def release(self, pages: IntArray) -> None:
        """Logical pages went back to the allocator: drop whatever is still resident."""
        if self._held_frees is not None:
            self._held_frees.append(pages)
            return
        if self.cover[pages].any():
            raise RuntimeError("kvir: a logical page was freed under a running request")
        for c in range(self.geometry.class_count):
            resident = pages[self.alive[pages, c]]
            if len(resident):
                self.drop_idle(resident, c)
        self.version += 1

    # ---- making room ---------------------------------------------------------------------------------------

    def make_room(self, wanted: int, tree: EvictableTree | None) -> bool:
        """For a decode step: `wanted` head-pages on the free stack."""
        return self.reclaimer.make_room(wanted, tree)

    def make_room_for_extend(
        self, needed: IntArray, tree: EvictableTree | None, *, interior_only: bool = False
    ) -> bool:
        """For an extend that allocates needed[l] head-pages in layer l; what just slid out helps its own
        layer.
        """

        def short() -> int:
            return missing_per_layer(needed, self.pool.quarantined_by_layer())

        ok = self.reclaimer.make_room(short(), tree, interior_only=interior_only)
        if interior_only:
            return ok
        # last resort: tree pages that slid out in this very step are still read, but may serve their own
        # layer
        while not ok and self._slid_now:
            entries, _ = self._slid_now.pop(0)
            for page, c, epoch in entries:
                self.still_read[page, c] = False
                if self.epoch[page, c] == epoch and self.is_reclaimable(page, c):
                    self.idle_head_pages -= int(self.geometry.class_size[c])
                    self.drop(np.array([page]), c, still_read=True)
                    self.counters["tombstoned_at_once"] += 1
            ok = self.pool.free >= short()
        return ok
