"""Changes of the residency table on their way to the device.

The host owns the table; the device copy is changed only by deltas which the attention backend applies at the
start of a forward, on that forward's stream.  Launch order is scheduling order, so nothing waits and nothing
lags, overlap or not.

An extend reads prefix pages that its own scheduling has just let slide out.  Their removal is queued for the
forward *after* it (`later`).  One case needs more: the partial last page of the prefix is read and written by
the same forward, and a class that lets it slide must not write it.  Its row is removed at once, and the
forward reads a *shadow*: a copy of the old row in a spare row of the device table.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Rows = NDArray[np.int32]


class TableDeltas:
    """Row snapshots in order; for one page the last one wins.

    Rows are those of all ranks; the device's table has the units of one, `own_units`.
    """

    def __init__(self, own_units: NDArray[np.int64]) -> None:
        self._own_units = own_units
        self.clear()

    def clear(self) -> None:
        self._now: list[tuple[NDArray[np.int64], Rows]] = []
        self._later: list[tuple[NDArray[np.int64], Rows]] = []
        self._shadows: list[tuple[int, Rows]] = []

    def push(self, pages: NDArray[np.int64], rows: Rows, *, later: bool = False) -> None:
        """`rows` [len(pages), U] must be a copy: the truth as of now."""
        (self._later if later else self._now).append((pages, rows))

    def push_shadow(self, request: int, row: Rows) -> None:
        """The old row of the partial page of the batch's request number `request`."""
        self._shadows.append((request, row))

    def apply(self, table: torch.Tensor, shadow_base: int) -> list[int]:
        """Bring the device table up to date for the forward that starts now.

        Returns the batch positions of requests whose partial page must be read through its shadow, row
        `shadow_base + position`.
        """
        entries = self._now
        self._now, self._later = self._later, []
        shadows, self._shadows = self._shadows, []
        if shadows:
            positions = np.array([shadow_base + i for i, _ in shadows], np.int64)
            entries = [*entries, (positions, np.stack([row for _, row in shadows]))]
        if entries:
            pages = np.concatenate([p for p, _ in entries])
            rows = np.concatenate([r for _, r in entries])
            if len(entries) > 1:
                # keep the last snapshot of each page: a scatter with repeated indices has no order
                pages, last = np.unique(pages[::-1], return_index=True)
                rows = rows[::-1][last]
            table.index_copy_(
                0,
                torch.from_numpy(pages).to(table.device),
                torch.from_numpy(rows[:, self._own_units]).to(table.device),
            )
        return [i for i, _ in shadows]
