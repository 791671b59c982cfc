"""The free head-pages of the pool: a stack, and a quarantine per layer.

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
    """Ids 0 .. size - 1.  Every id is either free, quarantined, or out (resident)."""

    def __init__(self, size: int, layer_count: int) -> None:
        self.size = size
        self.layer_count = layer_count
        self.reset()

    def reset(self) -> None:
        self._stack: HeadPages = np.arange(self.size - 1, -1, -1, dtype=np.int32)
        self.free = self.size
        self._is_out = np.zeros(self.size, bool)
        # one list more than there are layers, always empty: for pages that any layer may use
        self._quarantine: list[list[int]] = [[] for _ in range(self.layer_count + 1)]
        self.quarantined = 0
        self.reused_in_quarantine = 0
        self.freed_log: list[HeadPages] | None = None  # debugging: ids freed since the last poisoning

    @property
    def resident(self) -> int:
        return self.size - self.free - self.quarantined

    def quarantined_by_layer(self) -> IntArray:
        """[layers + 1], the last for any layer: none."""
        return np.array([len(q) for q in self._quarantine], np.int64)

    def take(self, layers: IntArray) -> HeadPages:
        """One head-page for each entry of `layers`; quarantined pages of that layer first.  `layer_count`
        stands for any layer.

        Raises MemoryError if there are not enough; callers make room before they take.
        """
        out = np.empty(len(layers), np.int32)
        rest = np.arange(len(layers))
        if self.quarantined:
            fresh: list[int] = []
            for i, layer in enumerate(layers.tolist()):
                if self._quarantine[layer]:
                    out[i] = self._quarantine[layer].pop()
                    self.quarantined -= 1
                    self.reused_in_quarantine += 1
                else:
                    fresh.append(i)
            rest = np.asarray(fresh, np.int64)
        n = len(rest)
        if n > self.free:
            raise MemoryError(f"kvir: head-page pool exhausted: {n} wanted, {self.free} free of {self.size}")
        out[rest] = self._stack[self.free - n : self.free][::-1]
        self.free -= n
        if self._is_out[out].any():
            raise RuntimeError("kvir: a head-page was handed out twice")
        self._is_out[out] = True
        return out

    def give(self, head_pages: HeadPages, layers: IntArray, *, still_read: bool) -> None:
        """Return head-pages; `still_read` ones go to their layer's quarantine until `drain`."""
        if not self._is_out[head_pages].all():
            raise RuntimeError("kvir: a head-page was freed twice")
        self._is_out[head_pages] = False
        if still_read:
            for head_page, layer in zip(head_pages.tolist(), layers.tolist(), strict=True):
                self._quarantine[layer].append(head_page)
            self.quarantined += len(head_pages)
            return
        self._push(head_pages)

    def drain(self) -> None:
        """The forward that read the quarantined pages was launched: they are free."""
        if not self.quarantined:
            return
        pages = np.array([p for q in self._quarantine for p in q], np.int32)
        self._quarantine = [[] for _ in range(self.layer_count + 1)]
        self.quarantined = 0
        self._push(pages)

    def _push(self, pages: HeadPages) -> None:
        self._stack[self.free : self.free + len(pages)] = pages
        self.free += len(pages)
        if self.freed_log is not None:
            self.freed_log.append(pages.copy())

    def take_freed_log(self) -> HeadPages:
        """Ids freed since the last call which are free still (debugging: they get poisoned)."""
        if not self.freed_log:
            return np.empty(0, np.int32)
        pages = np.concatenate(self.freed_log)
        self.freed_log = []
        return pages[~self._is_out[pages]]

    def violations(self) -> list[str]:
        """Broken invariants, in words; empty when healthy.  O(size)."""
        found: list[str] = []
        stack = self._stack[: self.free]
        quarantine = np.array([p for q in self._quarantine for p in q], np.int64)
        listed = np.concatenate([stack.astype(np.int64), quarantine])
        if len(np.unique(listed)) != len(listed):
            found.append("a head-page is listed free twice")
        if self._is_out[listed].any():
            found.append("a head-page is free and resident at once")
        out = int(self._is_out.sum())
        if out + len(listed) != self.size:
            found.append(f"free {self.free} + quarantined {self.quarantined} + out {out} != {self.size}")
        return found
