"""The residency table, cell by cell: what is really in memory, and who needs it.

The host owns the truth.  Per (logical page, class) cell:

    alive    its head-pages exist
    cover    number of running requests whose window, sinks or held tail include it
    epoch    changes whenever the cell is covered or dropped, so that old queue entries are recognised

A cell is *covered* (cover > 0), *idle* (alive, cover 0: only the prefix tree's, counts as available) or
absent. Free + quarantined + resident head-pages = pool, always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np

from kvir.sglang_ext.deltas import TableDeltas
from kvir.sglang_ext.geometry import Geometry, IntArray
from kvir.sglang_ext.headpages import HeadPagePool
from kvir.sglang_ext.reclaim import Entry

ABSENT = -1


class Cells:
    """Logical pages 0 .. page_count - 1 (page 0 belongs to padded tokens and is never resident)."""

    def __init__(self, geometry: Geometry, page_count: int, head_page_count: int) -> None:
        self.geometry = geometry
        self.page_count = page_count
        self.pool = HeadPagePool(head_page_count, geometry.layer_count, geometry.ranks.count)
        self.deltas = TableDeltas(geometry.own_units)
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
        self.still_read = np.zeros(shape, bool)  # slid out while the extend being scheduled reads it
        self.readers = np.zeros(self.page_count, np.int32)  # running requests with the page in their sequence
        self.pages_in_use = 0
        self.idle_head_pages: IntArray = np.zeros(geo.ranks.count, np.int64)  # [R]
        self.version = 0  # of everything that the accounting depends on
        self._held_frees: list[IntArray] | None = None
        self.partial_pages: set[int] = set()  # pages that the extend being scheduled begins inside of
        self.pool.reset()
        self.deltas.clear()

    # ---- capacity ------------------------------------------------------------------------------------------

    @property
    def available(self) -> IntArray:
        """[R] head-pages that could be had without touching what running requests read."""
        return self.pool.free + self.pool.quarantined + self.idle_head_pages

    @property
    def covered_head_pages(self) -> IntArray:
        """[R]"""
        return self.pool.resident - self.idle_head_pages

    def is_reclaimable(self, page: int, c: int, *, sinks: bool = False) -> bool:
        """Sinks are not given up one by one (`sinks`: unless nothing else is left): a prefix without them is
        worthless.
        """
        return bool(
            self.alive[page, c]
            and self.cover[page, c] == 0
            and not self.still_read[page, c]
            and (sinks or not self.is_sink[page, c])
        )

    def idle_cells(self) -> Iterator[Entry]:
        """Every idle cell: the last resort."""
        for c in range(self.geometry.class_count):
            for page in np.nonzero(self.alive[:, c] & (self.cover[:, c] == 0))[0].tolist():
                yield page, c, int(self.epoch[page, c])

    # ---- cells ---------------------------------------------------------------------------------------------

    def push_rows(self, pages: IntArray, *, later: bool = False) -> None:
        self.deltas.push(pages, self.table[pages], later=later)

    def drop(self, pages: IntArray, c: int, *, still_read: bool) -> None:
        """Free the head-pages of alive, uncovered cells."""
        units = self.geometry.class_units[c]
        cells = (pages[:, None], units[None])
        head_pages = self.table[cells].ravel()
        lanes = np.tile(self.geometry.class_lanes[c], len(pages))
        self.table[cells] = ABSENT
        self.alive[pages, c] = False
        self.is_sink[pages, c] = False
        self.epoch[pages, c] += 1
        if not still_read:
            self.pool.give(head_pages, lanes, still_read=False)
            self.push_rows(pages)
            return
        self.pool.give(head_pages, lanes, still_read=True)
        # the partial page is written by this forward too: its removal shows at once, its old row is read by
        # shadow
        partial = (
            np.isin(pages, list(self.partial_pages)) if self.partial_pages else np.zeros(len(pages), bool)
        )
        if partial.any():
            self.push_rows(pages[partial])
        if not partial.all():
            self.push_rows(pages[~partial], later=True)

    def drop_idle(self, pages: IntArray, c: int) -> None:
        self.idle_head_pages -= len(pages) * self.geometry.class_ranks[c]
        self.drop(pages, c, still_read=False)

    def add_cover(self, pages: IntArray, c: int) -> None:
        if not len(pages):
            return
        if not self.alive[pages, c].all():
            raise RuntimeError("kvir: a matched prefix has a hole")
        self.idle_head_pages -= int((self.cover[pages, c] == 0).sum()) * self.geometry.class_ranks[c]
        self.cover[pages, c] += 1
        self.epoch[pages, c] += 1

    def fill(self, pages: IntArray, c: int) -> None:
        """Give head-pages to absent cells; the request that asked covers them."""
        units = self.geometry.class_units[c]
        head_pages = self.pool.take(np.tile(self.geometry.class_lanes[c], len(pages)))
        self.table[pages[:, None], units[None]] = head_pages.reshape(len(pages), len(units))
        self.alive[pages, c] = True
        self.cover[pages, c] = 1
        self.epoch[pages, c] += 1

    def move(self, a: IntArray, b: IntArray, index: IntArray, covered: np.ndarray, c: int) -> None:
        """The tree's pages `b` stand for the request's duplicates `a`, at page positions `index`: covers move
        over, and where the tree has a hole, so do the pointers to the head-pages."""
        self.cover[a[covered], c] -= 1
        if self.cover[a[covered], c].any():
            raise RuntimeError("kvir: somebody else reads a private page")
        self.idle_head_pages += int(covered.sum()) * self.geometry.class_ranks[c]
        heal = self.alive[a, c] & ~self.alive[b, c]
        if heal.any():
            units = self.geometry.class_units[c][None]
            source, target = a[heal][:, None], b[heal][:, None]
            self.table[target, units] = self.table[source, units]
            self.table[source, units] = ABSENT
            self.alive[b[heal], c], self.alive[a[heal], c] = True, False
            self.is_sink[b[heal], c] = index[heal] < self.geometry.prefill.sink_pages[c]
            self.is_sink[a[heal], c] = False
            self.epoch[b[heal], c] += 1
            self.counters["healed"] += int(heal.sum())
        self.add_cover(b[covered], c)

    def read(self, pages: IntArray) -> None:
        self.pages_in_use += int((self.readers[pages] == 0).sum())
        self.readers[pages] += 1

    def unread(self, pages: IntArray) -> None:
        self.readers[pages] -= 1
        self.pages_in_use -= int((self.readers[pages] == 0).sum())

    # ---- logical frees -------------------------------------------------------------------------------------

    def hold_frees(self) -> None:
        """While the tree inserts, logical frees of duplicates wait: their rows may heal the tree."""
        self._held_frees = []

    def resume_frees(self) -> None:
        waiting, self._held_frees = self._held_frees, None
        for pages in waiting or []:
            self.release(pages)

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
