"""Spare rows of the residency table, and the head-pages behind them: who has them, who waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvir.sglang_ext.compact import Compact
from kvir.sglang_ext.folding import Chosen
from kvir.sglang_ext.geometry import IntArray

if TYPE_CHECKING:
    from kvir.sglang_ext.cells import Cells
    from kvir.sglang_ext.requests import RequestState


class CompactStore:
    """Of one pool."""

    def __init__(self, cells: Cells, spare_base: int, spare_count: int) -> None:
        self._cells = cells
        self._base, self._count = spare_base, spare_count
        self.clear()

    def clear(self) -> None:
        self._free = list(range(self._base + self._count - 1, self._base - 1, -1))
        self.head_pages = 0  # resident because of compact rows
        self._unsettled: list[Compact] = []

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def needed_by_lane(self, state: RequestState, chosen: Chosen) -> IntArray:
        """[lanes] head-pages that a selection takes beside those that the request has."""
        geo, extra = self._cells.geometry, self._extra(state, chosen)
        known = np.bincount(geo.lane_of_unit, weights=extra, minlength=geo.lane_count)
        return chosen.stock + known.astype(np.int64)

    def _extra(self, state: RequestState, chosen: Chosen) -> IntArray:
        """[U] head-pages that units take whose number of rows is known."""
        pages = -(-chosen.most // self._cells.geometry.page_tokens)
        had = 0 if state.compact is None else state.compact.pages
        return np.where(chosen.moves & chosen.exact, np.maximum(pages - had, 0), 0)

    def needed_rows(self, chosen: Chosen) -> int:
        """Spare rows that the copied rows, and the sinks of the other units, take."""
        geo = self._cells.geometry
        pages = -(-chosen.most // geo.page_tokens)
        return int(np.where(chosen.moves, pages, geo.unit_sink_pages).max(initial=0))

    def needed(self, states: Sequence[RequestState], folds: Sequence[Chosen | None]) -> IntArray:
        """[R] head-pages that the selections of a decode step take; None: the request selects nothing."""
        total = np.zeros(self._cells.geometry.lane_count, np.int64)
        for state, chosen in zip(states, folds, strict=True):
            if chosen is not None:
                total += self.needed_by_lane(state, chosen)
        return self._cells.geometry.by_rank(total)

    def reserve(self, state: RequestState, chosen: Chosen | None) -> Compact | None:
        """Head-pages for the selection that runs in the forward being launched, if one does."""
        if chosen is None:
            return None
        geo, pool = self._cells.geometry, self._cells.pool
        compact = self._empty() if state.compact is None else state.compact
        state.compact = compact
        count = self.needed_rows(chosen) - len(compact.spare_rows)
        if count > len(self._free):
            raise MemoryError("kvir: no spare rows in the residency table")
        before = compact.head_pages
        if count > 0:
            spare = np.array([self._free.pop() for _ in range(count)], np.int64)
            shape = (count, geo.unit_count)
            compact.spare_rows = np.concatenate([compact.spare_rows, spare])
            compact.table = np.concatenate([compact.table, np.full(shape, -1, np.int32)])
            compact.owned = np.concatenate([compact.owned, np.zeros(shape, bool)])
        # units that know their number of rows take their pages from the stock of their lane too
        stock = self.needed_by_lane(state, chosen)
        for lane in np.nonzero(stock)[0].tolist():
            compact.stock[lane] = pool.take(np.full(stock[lane], lane)).tolist()
        compact.chosen = chosen
        self.head_pages += compact.head_pages - before
        self.refresh_sinks(state)
        return compact

    def _empty(self) -> Compact:
        units = self._cells.geometry.unit_count
        none = np.zeros(units, np.int64)
        return Compact(
            geometry=self._cells.geometry,
            moved=np.zeros(units, bool),
            tokens=none.copy(),
            left=none.copy(),
            copied=none.copy(),
            spare_rows=np.zeros(0, np.int64),
            table=np.zeros((0, units), np.int32),
            owned=np.zeros((0, units), bool),
            positions={},
        )

    def publish(self, compact: Compact) -> None:
        """The forward has placed every unit of the selection: the device table learns of it before the next
        one.
        """
        assert compact.chosen is not None
        moved, at = compact.chosen.moves, compact.chosen.at
        counters = self._cells.counters
        counters["selections"] += 1
        counters["rows_evicted"] += compact.evicted
        compact.evicted = 0
        if (compact.tokens[moved] != at[moved]).any():
            raise RuntimeError("kvir: a unit that should select did not")
        compact.chosen, compact.slides, compact.placed = None, True, []
        self._unsettled.append(compact)
        self._cells.deltas.push(compact.spare_rows, compact.table.copy())

    def settle(self) -> None:
        """Give back what selections that are done did not use."""
        waiting, self._unsettled = self._unsettled, []
        for compact in waiting:
            self.head_pages -= sum(map(len, compact.stock.values()))
            self._return_stock(compact)
            used = compact.table >= 0
            count = int(np.nonzero(used.any(1))[0].max(initial=-1)) + 1
            self._free.extend(compact.spare_rows[count:].tolist())
            compact.spare_rows = compact.spare_rows[:count]
            compact.table, compact.owned = compact.table[:count], compact.owned[:count]

    def refresh_sinks(self, state: RequestState) -> None:
        """Point the sinks of units that keep rows by position at what their logical pages hold now."""
        compact, geo = state.compact, self._cells.geometry
        if compact is None or not len(compact.spare_rows):
            return
        for i in range(min(len(compact.spare_rows), len(state.pages))):
            alias = ~compact.moved & (geo.unit_sink_pages > i)
            compact.table[i, alias] = self._cells.table[state.pages[i], alias]
        self._cells.deltas.push(compact.spare_rows, compact.table.copy())

    def release(self, state: RequestState) -> None:
        compact, geo = state.compact, self._cells.geometry
        if compact is None:
            return
        state.compact = None
        self.head_pages -= compact.head_pages
        self._unsettled = [other for other in self._unsettled if other is not compact]
        lanes = np.broadcast_to(geo.lane_of_unit, compact.owned.shape)[compact.owned]
        self._cells.pool.give(compact.table[compact.owned], lanes, still_read=False)
        self._return_stock(compact)
        self._free.extend(compact.spare_rows.tolist())

    def _return_stock(self, compact: Compact) -> None:
        stock, compact.stock = compact.stock, {}
        for lane, pages in stock.items():
            self._cells.pool.give(np.array(pages, np.int32), np.full(len(pages), lane), still_read=False)
