"""Compact rows: what selections leave of a sequence, private to its request.

Unit u keeps some rows in head-pages of its own, in position order.  They are reached through spare rows of
the residency table, behind the logical pages: spare row i holds, for every unit, its i-th compact head-page.
So a request in decode reads the pages [spare rows ..., its logical pages ...] with the bounds

    sink = rows of the unit in the spare rows      recent = rows that it reads through the logical pages

and the kernels need nothing new.  A unit that keeps rows by position finds its sinks among the spare rows too
(an alias of the head-pages that its logical pages hold) and its window among the logical pages.

How many rows a unit gets is known before the forward, or only when its rivals have been scored.  In the
second case head-pages for all rivals together are reserved as a *stock*, from which the forward serves them;
the next scheduling step gives back what is left (`settle`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvir.sglang_ext.folding import BoolArray, Chosen
from kvir.sglang_ext.geometry import Geometry, IntArray
from kvir.sglang_ext.ranks import Placed

if TYPE_CHECKING:
    from kvir.sglang_ext.cells import Cells
    from kvir.sglang_ext.requests import RequestState


@dataclass
class Compact:
    """The compact rows of one request, of all ranks.  Arrays are [U], tables [len(spare_rows), U]."""

    geometry: Geometry
    moved: BoolArray  # units that have selected
    tokens: IntArray  # length at which the unit selected last
    left: IntArray  # rows before that length that stayed where they were, in the partial page
    copied: IntArray  # rows in compact head-pages
    spare_rows: IntArray  # rows of the device table
    table: NDArray[np.int32]  # head-page or -1
    owned: BoolArray  # which of them are the request's own
    positions: dict[int, IntArray]  # of the copied rows of units that moved, ascending
    chosen: Chosen | None = None  # the selection that is under way
    evicted: int = 0  # rows that it has dropped so far
    slides: bool = False  # dense pages that it left behind are to be given back
    stock: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # lane -> head-pages
    placed: Placed = field(default_factory=list[tuple[int, IntArray]])  # by the forward that is under way

    @property
    def head_pages_by_rank(self) -> IntArray:
        """[R] resident because of this request."""
        stock = np.zeros(self.geometry.lane_count, np.int64)
        for lane, pages in self.stock.items():
            stock[lane] = len(pages)
        owned = np.bincount(
            self.geometry.rank_of_unit, weights=self.owned.sum(0), minlength=self.geometry.ranks.count
        )
        return owned.astype(np.int64) + self.geometry.by_rank(stock)

    @property
    def head_pages(self) -> int:
        return int(self.head_pages_by_rank.sum())

    @property
    def page_tokens(self) -> int:
        return self.geometry.page_tokens

    @property
    def pages(self) -> IntArray:
        """[U] compact head-pages of each unit."""
        return self.owned.sum(0).astype(np.int64)

    @property
    def start_page(self) -> IntArray:
        """[U] units that moved keep the logical pages from here on."""
        return self.tokens // self.page_tokens

    def account(self) -> dict[str, list[int] | bool]:
        """What selections left, JSON-ready, by unit: rows in compact head-pages, the first token of the
        dense pages, and the length at which the unit selected last (0: never).  `settled`: what the last
        selection left behind has been given back, as the next step does."""
        at = np.where(self.moved, self.tokens, 0)
        return {
            "rows": self.copied.tolist(),
            "dense_from": (at // self.page_tokens * self.page_tokens).tolist(),
            "at": at.tolist(),
            "settled": self.chosen is None and not self.slides and not self.stock,
        }

    def held(self, unit: int, tokens: int) -> int:
        """Rows that a unit which selects holds at length `tokens`."""
        return int(self.rows(tokens)[unit]) if self.moved[unit] else tokens

    def rows(self, tokens: int) -> IntArray:
        """[U] rows that units which moved hold at length `tokens`."""
        return self.copied + tokens - self.tokens + self.left

    def place(self, unit: int, positions: IntArray) -> NDArray[np.int64]:
        """The head-pages for a unit's rows at `positions`, in order.  Called by the forward, once per unit
        that selects.

        Raises RuntimeError if they are more than was promised.
        """
        chosen, rows = self.chosen, len(positions)
        assert chosen is not None
        pages, had = -(-rows // self.page_tokens), int(self.owned[:, unit].sum())
        promised, tokens = int(chosen.most[unit]), int(chosen.at[unit])
        if rows > promised or (chosen.exact[unit] and rows != promised):
            raise RuntimeError(f"kvir: unit {unit} selected {rows} rows, not {promised}")
        lane = int(self.geometry.lane_of_unit[unit])
        own = self.stock.setdefault(lane, [])
        anywhere = self.stock.get(self.geometry.any_lane(lane), [])
        if pages - had > len(own) + len(anywhere):
            raise RuntimeError(f"kvir: unit {unit} selected {rows} rows, and no head-pages are left for them")
        for i in range(had, pages):
            self.table[i, unit], self.owned[i, unit] = (own or anywhere).pop(), True
        for i in range(pages, had):
            own.append(int(self.table[i, unit]))
            self.table[i, unit], self.owned[i, unit] = -1, False
        self.evicted += int(self.held(unit, tokens) - rows - chosen.left[unit])
        self.copied[unit], self.positions[unit] = rows, positions
        self.tokens[unit], self.left[unit], self.moved[unit] = tokens, chosen.left[unit], True
        self.placed.append((unit, positions))
        return self.table[:pages, unit].astype(np.int64)

    def decode_view(self, tokens: int, recent: IntArray) -> tuple[int, IntArray, IntArray]:
        """How a decode step at `tokens` tokens reads this rank's units: (rows before its logical pages, sink
        [own units], recent [own units]); `recent` is the plan's own window of each of them.
        """
        own = self.geometry.own_units
        moved, copied = self.moved[own], self.copied[own]
        by_position = np.minimum(self.geometry.unit_sink_tokens[own], tokens)
        sinks = np.where(moved, copied, by_position)
        fresh = tokens - self.tokens[own] + self.left[own]
        # sinks are read among the spare rows: the window must not find them again
        window = np.minimum(recent, tokens - sinks)
        before = len(self.spare_rows) * self.page_tokens
        return before, sinks, np.where(moved, fresh, window)


class CompactStore:
    """Spare table rows, and the head-pages behind them."""

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
