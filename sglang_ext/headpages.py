"""The free head-pages of the pool: a stack per rank, and a quarantine per lane (a layer of a rank).

While an extend (prefill chunk) is being scheduled, pages that slide out of a window are still read by that
very forward: by their own layer, before that layer writes.  So such a page may be reused in this forward by
its own layer only; giving it to another layer would overwrite it before it is read.  With the quarantine the
old and the new window of a chunk never coexist.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvir.sglang_ext.geometry import IntArray

HeadPages = NDArray[np.int32]


class HeadPagePool:
    """Ids 0 .. size - 1 of every rank.  Every id is either free, quarantined, or out (resident).

    Counts are [R], one for each rank; a lane names its rank (`ranks.py`).
    """

    def __init__(self, size: int, layer_count: int, rank_count: int = 1) -> None:
        self.size = size
        self.rank_count = rank_count
        self._stride = layer_count + 1  # lanes of a rank; the last, always empty, is for any layer
        self.reset()

    def reset(self) -> None:
        ids = np.arange(self.size - 1, -1, -1, dtype=np.int32)
        self._stack: HeadPages = np.tile(ids, (self.rank_count, 1))
        self.free: IntArray = np.full(self.rank_count, self.size, np.int64)
        self._is_out = np.zeros((self.rank_count, self.size), bool)
        self._quarantine: list[list[int]] = [[] for _ in range(self.rank_count * self._stride)]
        self.quarantined: IntArray = np.zeros(self.rank_count, np.int64)
        self.reused_in_quarantine = 0
        # debugging: (rank, ids) freed since the last poisoning
        self.freed_log: list[tuple[int, HeadPages]] | None = None

    @property
    def resident(self) -> IntArray:
        return self.size - self.free - self.quarantined

    def quarantined_by_lane(self) -> IntArray:
        """[lanes]"""
        return np.array([len(q) for q in self._quarantine], np.int64)

    def take(self, lanes: IntArray) -> HeadPages:
        """One head-page for each entry of `lanes`; quarantined pages of that lane first.

        Raises MemoryError if there are not enough; callers make room before they take.
        """
        out = np.empty(len(lanes), np.int32)
        rest = np.arange(len(lanes))
        if self.quarantined.any():
            fresh: list[int] = []
            for i, lane in enumerate(lanes.tolist()):
                if self._quarantine[lane]:
                    out[i] = self._quarantine[lane].pop()
                    self.quarantined[lane // self._stride] -= 1
                    self.reused_in_quarantine += 1
                else:
                    fresh.append(i)
            rest = np.asarray(fresh, np.int64)
        ranks = lanes // self._stride
        for rank in range(self.rank_count):
            mine = rest[ranks[rest] == rank]
            n, free = len(mine), int(self.free[rank])
            if n > free:
                raise MemoryError(f"kvir: head-page pool exhausted: {n} wanted, {free} free of {self.size}")
            out[mine] = self._stack[rank, free - n : free][::-1]
            self.free[rank] -= n
        if self._is_out[ranks, out].any():
            raise RuntimeError("kvir: a head-page was handed out twice")
        self._is_out[ranks, out] = True
        return out

    def give(self, head_pages: HeadPages, lanes: IntArray, *, still_read: bool) -> None:
        """Return head-pages; `still_read` ones go to their lane's quarantine until `drain`."""
        ranks = lanes // self._stride
        if not self._is_out[ranks, head_pages].all():
            raise RuntimeError("kvir: a head-page was freed twice")
        self._is_out[ranks, head_pages] = False
        if still_read:
            for head_page, lane in zip(head_pages.tolist(), lanes.tolist(), strict=True):
                self._quarantine[lane].append(head_page)
            self.quarantined += np.bincount(ranks, minlength=self.rank_count)
            return
        for rank in range(self.rank_count):
            self._push(rank, head_pages[ranks == rank])

    def drain(self) -> None:
        """The forward that read the quarantined pages was launched: they are free."""
        if not self.quarantined.any():
            return
        for rank in range(self.rank_count):
            self._push(rank, self._quarantined_of(rank))
        self._quarantine = [[] for _ in self._quarantine]
        self.quarantined = np.zeros(self.rank_count, np.int64)

    def _quarantined_of(self, rank: int) -> HeadPages:
        lanes = self._quarantine[rank * self._stride : (rank + 1) * self._stride]
        return np.array([page for lane in lanes for page in lane], np.int32)

    def _push(self, rank: int, pages: HeadPages) -> None:
        free = int(self.free[rank])
        self._stack[rank, free : free + len(pages)] = pages
        self.free[rank] += len(pages)
        if self.freed_log is not None:
            self.freed_log.append((rank, pages.copy()))

    def take_freed_log(self, rank: int) -> HeadPages:
        """Ids of a rank freed since the last call which are free still (debugging: they get poisoned)."""
        mine = [pages for of, pages in self.freed_log or () if of == rank]
        if not mine:
            return np.empty(0, np.int32)
        pages = np.concatenate(mine)
        self.freed_log = []
        return pages[~self._is_out[rank, pages]]

    def violations(self) -> list[str]:
        """Broken invariants, in words; empty when healthy.  O(size)."""
        found: list[str] = []
        for rank in range(self.rank_count):
            stack, waiting = self._stack[rank, : self.free[rank]], self._quarantined_of(rank)
            listed = np.concatenate([stack, waiting])
            if len(np.unique(listed)) != len(listed):
                found.append("a head-page is listed free twice")
            if self._is_out[rank, listed].any():
                found.append("a head-page is free and resident at once")
            out = int(self._is_out[rank].sum())
            if out + len(listed) != self.size or len(waiting) != self.quarantined[rank]:
                found.append(
                    f"free {self.free[rank]} + quarantined {len(waiting)} + out {out} != {self.size}"
                )
        return found
