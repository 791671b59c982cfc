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

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvir.sglang_ext.folding import BoolArray, Chosen
from kvir.sglang_ext.geometry import Geometry, IntArray
from kvir.sglang_ext.ranks import Placed

if TYPE_CHECKING:
    pass


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
    allotted: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # unit -> head-pages

    @property
    def head_pages_by_rank(self) -> IntArray:
        """[R] resident because of this request."""
        stock = np.zeros(self.geometry.lane_count, np.int64)
        for lane, pages in self.stock.items():
            stock[lane] = len(pages)
        for unit, pages in self.allotted.items():
            stock[self.geometry.lane_of_unit[unit]] += len(pages)
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
        own += self.allotted.pop(unit, [])  # the last of the stock are the first to go
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

    def allot(self, unit: int) -> NDArray[np.int32]:
        """Head-pages for as many rows as a unit may keep, those that it has first; `place` takes as many of
        them as it needs, in order.

        Raises RuntimeError if its lane's stock is short of them.
        """
        assert self.chosen is not None
        had = int(self.owned[:, unit].sum())
        count = max(0, -(-int(self.chosen.most[unit]) // self.page_tokens) - had)
        stock = self.stock.get(int(self.geometry.lane_of_unit[unit]), [])
        if count > len(stock):
            raise RuntimeError(f"kvir: unit {unit} may keep rows for which no head-pages are reserved")
        extra = stock[len(stock) - count :]
        del stock[len(stock) - count :]
        self.allotted[unit] = extra
        return np.concatenate([self.table[:had, unit], np.array(extra[::-1], np.int32)])

    def held_positions(self, unit: int, tokens: int) -> IntArray:
        """Of the rows that a unit which selects holds at length `tokens`, ascending."""
        if not self.moved[unit]:
            return np.arange(tokens)
        first = int(self.tokens[unit] - self.left[unit])
        return np.concatenate([self.positions[unit], np.arange(first, tokens)])

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
