"""What to give up when head-pages are needed, and in which order.

1. *Interior* pages: slid out of a window somewhere inside a prefix the tree owns.  Oldest first.
2. Leaves of the prefix tree, least recently used first (the tree's own eviction).
3. *Tail* pages: the windows that end at prompt ends and branch points.  They are what makes a shared prefix
findable
   again, so they go last.

An entry carries the epoch of its (page, class) cell: a cell that was covered again since is not reclaimable
through an old entry.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvir.sglang_ext.geometry import IntArray

if TYPE_CHECKING:
    from kvir.sglang_ext.residency import Residency

Entry = tuple[int, int, int]  # page, class, epoch
EVICT_PAGES_PER_CALL = 16


class EvictableTree(Protocol):
    """The one thing the reclaimer asks of the prefix tree."""

    def evict_pages(self, pages: int) -> int:
        """Evict about `pages` logical pages, least recently used first; returns how many went."""
        ...


class Reclaimer:
    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.clear()

    def clear(self) -> None:
        self._interior: deque[Entry] = deque()
        self._tails: deque[Entry] = deque()

    def add(self, entries: list[Entry], *, tail: bool) -> None:
        (self._tails if tail else self._interior).extend(entries)

    def make_room(self, wanted: IntArray, tree: EvictableTree | None, *, interior_only: bool = False) -> bool:
        """Free head-pages until `wanted` [R] can be taken; False if that is not possible."""
        res = self._residency
        if not self.is_short(wanted):
            return True
        self._drop(self._interior, wanted)
        if interior_only:
            return not self.is_short(wanted)
        while self.is_short(wanted) and tree is not None:
            res.counters["tree_evictions"] += 1
            if tree.evict_pages(EVICT_PAGES_PER_CALL) == 0:
                break
        self._drop(self._tails, wanted)
        if self.is_short(wanted):
            self._drop(deque(res.idle_cells()), wanted, sinks=True)
        return not self.is_short(wanted)

    def is_short(self, wanted: IntArray) -> bool:
        """Whether `wanted` [R] cannot be taken now, on some rank."""
        return bool((self._residency.pool.free < wanted).any())

    def _drop(self, queue: deque[Entry], wanted: IntArray, *, sinks: bool = False) -> None:
        res, spared = self._residency, list[Entry]()
        while queue and self.is_short(wanted):
            page, c, epoch = entry = queue.popleft()
            if res.epoch[page, c] != epoch or not res.is_reclaimable(page, c, sinks=sinks):
                res.counters["stale_entries"] += 1
                continue
            if not res.geometry.class_ranks[c][res.pool.free < wanted].any():
                spared.append(entry)  # of ranks that have enough
                continue
            res.drop_idle(np.array([page]), c)
            res.counters["tombstoned"] += 1
        queue.extendleft(reversed(spared))
