"""The residency table: what is really in memory, who needs it, and what may go.

The host owns the truth.  Per (logical page, class) cell:
    alive    its head-pages exist
    cover    number of running requests whose window, sinks or held tail include it
    epoch    changes whenever the cell is covered or dropped, so that old queue entries are recognised
A cell is *covered* (cover > 0), *idle* (alive, cover 0: only the prefix tree's, counts as available) or
absent.  Private
cells never stay idle: at cover 0 they are dropped at once.  Free + quarantined + resident head-pages = pool,
always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from kvir.sglang_ext.deltas import TableDeltas
from kvir.sglang_ext.geometry import Geometry, IntArray
from kvir.sglang_ext.headpages import HeadPagePool
from kvir.sglang_ext.reclaim import Entry, EvictableTree, Reclaimer, missing_per_layer
from kvir.sglang_ext.requests import Landmarks, RequestState

ABSENT = -1


class Residency:
    """Logical pages 0 .. page_count - 1 (page 0 belongs to padded tokens and is never resident)."""

    def __init__(self, geometry: Geometry, page_count: int, head_page_count: int) -> None:
        self.geometry = geometry
        self.page_count = page_count
        self.pool = HeadPagePool(head_page_count, geometry.layer_count)
        self.deltas = TableDeltas()
        self.reclaimer = Reclaimer(self)
        self.counters: Counter[str] = Counter()
        self.reset()

    def reset(self) -> None:
        geo = self.geometry
        shape = (self.page_count, geo.class_count)
        self.table = np.full((self.page_count, geo.unit_count), ABSENT, np.int32)
        self.alive = np.zeros(shape, bool)
        self.cover = np.zeros(shape, np.int32)
        self.epoch = np.zeros(shape, np.int64)
        self.is_sink = np.zeros(shape, bool)
        self.readers = np.zeros(
            self.page_count, np.int32
        )  # running requests that have the page in their sequence
        self.pages_in_use = 0
        self.pool.reset()
        self.deltas.clear()
        self.reclaimer.clear()
        self.idle_head_pages = 0
        self.requests: dict[int, RequestState] = {}
        self.peak_resident = 0
        self.peak_covered = 0
        self.peak_pages_in_use = 0
        # state of the extend that is being scheduled
        self._in_extend = False
        self._partial_pages: set[int] = set()
        self._slid_now: list[tuple[list[Entry], bool]] = []
        self._still_read = np.zeros(shape, bool)
        self._held_frees: list[IntArray] | None = None
        self.version = 0

    # ---- capacity ------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Head-pages that could be had without touching what running requests read."""
        return self.pool.free + self.pool.quarantined + self.idle_head_pages

    @property
    def covered_head_pages(self) -> int:
        return self.pool.resident - self.idle_head_pages

    def is_reclaimable(self, page: int, c: int) -> bool:
        return bool(
            self.alive[page, c]
            and self.cover[page, c] == 0
            and not self.is_sink[page, c]
            and not self._still_read[page, c]
            and not self.geometry.is_full(c)
        )

    def idle_window_cells(self) -> Iterator[Entry]:
        """Every reclaimable cell: the last resort."""
        for c in range(self.geometry.class_count):
            if not self.geometry.is_full(c):
                for page in np.nonzero(self.alive[:, c] & (self.cover[:, c] == 0))[0].tolist():
                    yield page, c, int(self.epoch[page, c])

    # ---- one scheduling step -------------------------------------------------------------------------------

    def begin_step(self, *, extend: bool) -> None:
        """Scheduling of the next forward begins; the one before it was launched."""
        self.pool.drain()
        for entries, tail in self._slid_now:
            self.reclaimer.add(entries, tail=tail)
            for page, c, _ in entries:
                self._still_read[page, c] = False
        self._slid_now = []
        self._partial_pages.clear()
        self._in_extend = extend

    def end_step(self) -> None:
        self._in_extend = False
        self.version += 1
        self.peak_resident = max(self.peak_resident, self.pool.resident)
        self.peak_covered = max(self.peak_covered, self.covered_head_pages)
        self.peak_pages_in_use = max(self.peak_pages_in_use, self.pages_in_use)

    def note_partial_page(self, position: int, state: RequestState, prefix_tokens: int) -> None:
        """The extend of batch position `position` begins inside a page: its old row is read through a shadow."""
        page = state.pages[prefix_tokens // self.geometry.page_tokens]
        self._partial_pages.add(page)
        self.deltas.push_shadow(position, self.table[page].copy())

    # ---- cells ---------------------------------------------------------------------------------------------

    def _push_rows(self, pages: IntArray, *, later: bool = False) -> None:
        self.deltas.push(pages, self.table[pages], later=later)

    def _drop(self, pages: IntArray, c: int, *, still_read: bool) -> None:
        """Free the head-pages of alive, uncovered cells."""
        units = self.geometry.class_units[c]
        cells = (pages[:, None], units[None])
        head_pages = self.table[cells].ravel()
        layers = np.tile(self.geometry.class_layers[c], len(pages))
        self.table[cells] = ABSENT
        self.alive[pages, c] = False
        self.is_sink[pages, c] = False
        self.epoch[pages, c] += 1
        if not still_read:
            self.pool.give(head_pages, layers, still_read=False)
            self._push_rows(pages)
            return
        self.pool.give(head_pages, layers, still_read=True)
        # the partial page is written by this forward too: its removal shows at once, its old row is read by
        # shadow
        partial = (
            np.isin(pages, list(self._partial_pages)) if self._partial_pages else np.zeros(len(pages), bool)
        )
        if partial.any():
            self._push_rows(pages[partial])
        if not partial.all():
            self._push_rows(pages[~partial], later=True)

    def drop_idle(self, pages: IntArray, c: int) -> None:
        self.idle_head_pages -= len(pages) * int(self.geometry.class_size[c])
        self._drop(pages, c, still_read=False)

    def _add_cover(self, pages: IntArray, c: int) -> None:
        if not len(pages):
            return
        if not self.alive[pages, c].all():
            raise RuntimeError("kvir: a matched prefix has a hole")
        self.idle_head_pages -= int((self.cover[pages, c] == 0).sum()) * int(self.geometry.class_size[c])
        self.cover[pages, c] += 1
        self.epoch[pages, c] += 1

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
            self._drop(pages[private], c, still_read=self._in_extend)
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
            self._still_read[pages, c] = True
            self._slid_now.append((entries, tail))
        else:
            self.reclaimer.add(entries, tail=tail)

    def _read(self, pages: IntArray) -> None:
        self.pages_in_use += int((self.readers[pages] == 0).sum())
        self.readers[pages] += 1

    def _unread(self, pages: IntArray) -> None:
        self.readers[pages] -= 1
        self.pages_in_use -= int((self.readers[pages] == 0).sum())

    # ---- requests ------------------------------------------------------------------------------------------

    def open(self, kv: object, pages: list[int], tokens: int, landmarks: Landmarks) -> RequestState:
        """A request starts with a matched prefix of `tokens` tokens in `pages`, all of it owned by the tree."""
        geo = self.geometry
        state = RequestState(kv=kv, pages=list(pages), tree_pages=len(pages), landmarks=landmarks)
        sinks = geo.sink_pages
        state.first = np.minimum(
            np.maximum(geo.first_window_page(tokens), sinks), np.maximum(len(pages), sinks)
        )
        state.page_floor = tokens // geo.page_tokens
        all_pages = np.array(pages, np.int64)
        self._read(all_pages)
        for c in range(geo.class_count):
            self._add_cover(all_pages[: sinks[c]], c)
            self._add_cover(all_pages[state.first[c] :], c)
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
        self._read(pages)
        for c in range(geo.class_count):
            keep = self._surviving(state, c, index, tokens)
            held = self._held(state, c, index) & ~keep if hold_branch else np.zeros(len(index), bool)
            chosen = keep | held
            self.counters["rows_never_written"] += (len(index) - int(chosen.sum())) * int(geo.class_size[c])
            if chosen.any():
                self._fill(pages[chosen], c)
                self.is_sink[pages[index < geo.sink_pages[c]], c] = True
            if held.any():
                state.held.append((c, index[held]))
            first = max(int(geo.first_window_page(tokens)[c]), int(geo.sink_pages[c]))
            state.first[c] = max(
                int(state.first[c]), min(first, max(len(state.pages), int(geo.sink_pages[c])))
            )
        state.page_floor = max(state.page_floor, tokens // geo.page_tokens)
        if len(pages):
            self._push_rows(pages)

    def _fill(self, pages: IntArray, c: int) -> None:
        units = self.geometry.class_units[c]
        head_pages = self.pool.take(np.tile(self.geometry.class_layers[c], len(pages)))
        self.table[pages[:, None], units[None]] = head_pages.reshape(len(pages), len(units))
        self.alive[pages, c] = True
        self.cover[pages, c] = 1
        self.epoch[pages, c] += 1

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
        self._unread(np.array(state.pages, np.int64))
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
            self._unread(a)
            self._read(b)
            for c in range(geo.class_count):
                covered = (index < geo.sink_pages[c]) | (index >= state.first[c])
                for held_class, held_index in state.held:
                    if held_class == c:
                        covered |= np.isin(index, held_index)
                self._move_class(a, b, index, covered, c)
            self._push_rows(np.concatenate([a, b]))
        self.release_held(state)
        self.version += 1

    def _move_class(self, a: IntArray, b: IntArray, index: IntArray, covered: np.ndarray, c: int) -> None:
        size = int(self.geometry.class_size[c])
        self.cover[a[covered], c] -= 1
        if self.cover[a[covered], c].any():
            raise RuntimeError("kvir: somebody else reads a private page")
        self.idle_head_pages += int(covered.sum()) * size
        heal = self.alive[a, c] & ~self.alive[b, c]
        if heal.any():
            units = self.geometry.class_units[c][None]
            source, target = a[heal][:, None], b[heal][:, None]
            self.table[target, units] = self.table[source, units]
            self.table[source, units] = ABSENT
            self.alive[b[heal], c], self.alive[a[heal], c] = True, False
            self.is_sink[b[heal], c] = index[heal] < self.geometry.sink_pages[c]
            self.is_sink[a[heal], c] = False
            self.epoch[b[heal], c] += 1
            self.counters["healed"] += int(heal.sum())
        self._add_cover(b[covered], c)

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
                self._still_read[page, c] = False
                if self.epoch[page, c] == epoch and self.is_reclaimable(page, c):
                    self.idle_head_pages -= int(self.geometry.class_size[c])
                    self._drop(np.array([page]), c, still_read=True)
                    self.counters["tombstoned_at_once"] += 1
            ok = self.pool.free >= short()
        return ok
