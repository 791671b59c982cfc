"""Compact rows: what a selection leaves of a prompt, private to its request.

Unit u keeps some rows in head-pages of its own, in position order.  They are reached through spare rows of
the residency table, behind the logical pages: spare row i holds, for every unit, its i-th compact head-page.
So a request in decode reads the pages [spare rows ..., its logical pages ...] with the bounds

    sink = rows of the unit in the spare rows      recent = rows that it reads through the logical pages

and the kernels need nothing new.  A unit that keeps rows by position finds its sinks among the spare rows too
(an alias of the head-pages that its logical pages hold) and its window among the logical pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvir.lowering.compact import runs_in_prefill, tail_stays
from kvir.lowering.quota import first_run, kept_rows
from kvir.lowering.stages import LayoutPlan
from kvir.sglang_ext.geometry import Geometry, IntArray

if TYPE_CHECKING:
    from kvir.sglang_ext.cells import Cells
    from kvir.sglang_ext.requests import RequestState

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Chosen:
    """How many rows a selection at the end of a prompt leaves; which ones, the scores decide later."""

    moves: BoolArray  # [U] the unit selects now
    copied: IntArray  # [U] rows that go to compact head-pages
    left: IntArray  # [U] last rows that stay where they are, in the partial page


class Selections:
    """When a prompt is compacted, and to how many rows: what the plan says of units that select."""

    def __init__(self, layout: LayoutPlan) -> None:
        self._layout = layout
        self._classes = [
            (np.asarray(c.units), c.prefill.selection)
            for c in layout.compact
            if c.prefill.selection is not None
        ]

    def at_prompt_end(self, prompt_tokens: int) -> Chosen | None:
        """None if a prompt of that length stays as it is."""
        layout, n = self._layout, prompt_tokens
        if not any(runs_in_prefill(selection, n) for _, selection in self._classes):
            return None
        moves = np.zeros(layout.unit_count, bool)
        copied, left = np.zeros(layout.unit_count, np.int64), np.zeros(layout.unit_count, np.int64)
        for units, selection in self._classes:
            # a unit whose budget is the whole prompt moves too: units of one class keep the same pages
            moves[units] = True
            left[units] = n % layout.page_tokens if tail_stays(selection, layout.page_tokens) else 0
            copied[units] = kept_rows(first_run(selection, n, n)).most - left[units]
        return Chosen(moves, copied, left)


@dataclass
class Compact:
    """The compact rows of one request."""

    chosen: Chosen
    tokens: int  # length at which the selection ran
    start_page: int  # units that moved keep the logical pages from here on
    spare_rows: IntArray  # rows of the device table
    table: NDArray[np.int32]  # [len(spare_rows), U] head-page or -1
    owned: BoolArray  # the same shape: which of them are the request's own

    @property
    def head_pages(self) -> int:
        return int(self.owned.sum())

    def decode_view(
        self, geometry: Geometry, tokens: int, recent: IntArray
    ) -> tuple[int, IntArray, IntArray]:
        """How a decode step at `tokens` tokens reads: (rows before its logical pages, sink [U], recent [U]);
        `recent` is the plan's own window of each unit.
        """
        chosen = self.chosen
        sinks = np.where(chosen.moves, chosen.copied, np.minimum(geometry.unit_sink_tokens, self.tokens))
        fresh = tokens - self.tokens + chosen.left
        # sinks are read among the spare rows: the window must not find them again
        window = np.minimum(recent, tokens - sinks)
        before = len(self.spare_rows) * geometry.page_tokens
        return before, sinks, np.where(chosen.moves, fresh, window)


class CompactStore:
    """Spare table rows, and the head-pages behind them."""

    def __init__(self, cells: Cells, spare_base: int, spare_count: int) -> None:
        self._cells = cells
        self._base, self._count = spare_base, spare_count
        self.clear()

    def clear(self) -> None:
        self._free = list(range(self._base + self._count - 1, self._base - 1, -1))
        self.head_pages = 0  # resident because of compact rows

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def needed_per_layer(self, chosen: Chosen) -> IntArray:
        """[layers] head-pages that the copied rows take."""
        geo = self._cells.geometry
        pages = -(-chosen.copied // geo.page_tokens)
        return np.bincount(geo.layer_of_unit, weights=pages, minlength=geo.layer_count).astype(np.int64)

    def needed_rows(self, chosen: Chosen) -> int:
        """Spare rows that the copied rows, and the sinks of the other units, take."""
        geo = self._cells.geometry
        pages = -(-chosen.copied // geo.page_tokens)
        return int(np.where(chosen.moves, pages, geo.unit_sink_pages).max(initial=0))

    def reserve(self, state: RequestState, chosen: Chosen, tokens: int) -> Compact:
        """Head-pages for the selection that runs when the request has `tokens` tokens."""
        geo = self._cells.geometry
        count = self.needed_rows(chosen)
        if count > len(self._free):
            raise MemoryError("kvir: no spare rows in the residency table")
        spare = np.array([self._free.pop() for _ in range(count)], np.int64)
        owned = np.arange(count)[:, None] < -(-chosen.copied // geo.page_tokens)[None]
        table = np.full((count, geo.unit_count), -1, np.int32)
        taken = self._cells.pool.take(np.broadcast_to(geo.layer_of_unit, owned.shape)[owned])
        table[owned] = taken
        self.head_pages += len(taken)
        state.compact = Compact(chosen, tokens, tokens // geo.page_tokens, spare, table, owned)
        self.refresh_sinks(state)
        return state.compact

    def refresh_sinks(self, state: RequestState) -> None:
        """Point the sinks of units that keep rows by position at what their logical pages hold now."""
        compact, geo = state.compact, self._cells.geometry
        if compact is None or not len(compact.spare_rows):
            return
        for i in range(min(len(compact.spare_rows), len(state.pages))):
            alias = ~compact.chosen.moves & (geo.unit_sink_pages > i)
            compact.table[i, alias] = self._cells.table[state.pages[i], alias]
        self._cells.deltas.push(compact.spare_rows, compact.table.copy())

    def release(self, state: RequestState) -> None:
        compact, geo = state.compact, self._cells.geometry
        if compact is None:
            return
        state.compact = None
        layers = np.broadcast_to(geo.layer_of_unit, compact.owned.shape)[compact.owned]
        self._cells.pool.give(compact.table[compact.owned], layers, still_read=False)
        self.head_pages -= compact.head_pages
        self._free.extend(compact.spare_rows.tolist())
