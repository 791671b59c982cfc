"""Compact rows: what a selection leaves of a prompt, private to its request.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvir.lowering.compact import compact_pages, runs_in_prefill, tail_stays
from kvir.lowering.quota import first_run, kept_rows
from kvir.lowering.spans import Bounds
from kvir.lowering.stages import CompactClass, LayoutPlan, Selection
from kvir.sglang_ext.geometry import Geometry, IntArray

if TYPE_CHECKING:
    from kvir.sglang_ext.cells import Cells
    from kvir.sglang_ext.requests import RequestState

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Chosen:
    """How many rows a selection at the end of a prompt leaves; which ones, the scores decide later."""

    moves: BoolArray  # [U] the unit selects now
    exact: BoolArray  # [U] it gets `most` rows, whatever the scores are
    most: IntArray  # [U] rows that go to compact head-pages, at most
    left: IntArray  # [U] last rows that stay where they are, in the partial page
    stock: IntArray  # [layers + 1] head-pages for units that are not exact; the last is for any layer


class Selections:
    """When a prompt is compacted, and to how many rows: what the plan says of units that select."""

    def __init__(self, layout: LayoutPlan) -> None:
        self._layout = layout
        self._classes = [(c, c.prefill.selection) for c in layout.compact if c.prefill.selection is not None]

    def runs(self, prompt_tokens: int) -> bool:
        """Whether a prompt of that length is compacted."""
        return any(runs_in_prefill(selection, prompt_tokens) for _, selection in self._classes)

    def at_prompt_end(self, prompt_tokens: int) -> Chosen | None:
        """None if a prompt of that length stays as it is."""
        layout, n = self._layout, prompt_tokens
        if not self.runs(n):
            return None
        count = layout.unit_count
        moves, exact = np.zeros(count, bool), np.ones(count, bool)
        most, left = np.zeros(count, np.int64), np.zeros(count, np.int64)
        stock = np.zeros(count // layout.kv_heads + 1, np.int64)
        for c, selection in self._classes:
            units = np.asarray(c.units)
            # a unit whose budget is the whole prompt moves too: units of one class keep the same pages
            moves[units] = True
            tail = n % layout.page_tokens if tail_stays(selection, layout.page_tokens) else 0
            rows = kept_rows(first_run(selection, n, n))
            left[units], most[units] = tail, rows.most - tail
            if not rows.exact:
                exact[units] = False
                for layer, pages in self._stock(c, selection, n, tail):
                    stock[layer] += pages
        return Chosen(moves, exact, most, left, stock)

    def _stock(self, c: CompactClass, selection: Selection, n: int, tail: int) -> Iterator[tuple[int, int]]:
        """(layer, head-pages) that rivals take at most; layer -1: rivals of all layers share them."""

        def most(units: Sequence[int]) -> int:
            return compact_pages(self._layout, units, first_run(selection, n, n), Bounds(tail, tail)).most

        if any(quota.scope == "model" for quota in selection.quotas):
            yield -1, most(c.units)
            return
        layers = np.asarray(c.units) // self._layout.kv_heads
        for layer in np.unique(layers).tolist():
            yield layer, most(np.asarray(c.units)[layers == layer].tolist())


@dataclass
class Compact:
    """The compact rows of one request."""

    chosen: Chosen
    tokens: int  # length at which the selection ran
    start_page: int  # units that moved keep the logical pages from here on
    spare_rows: IntArray  # rows of the device table
    table: NDArray[np.int32]  # [len(spare_rows), U] head-page or -1
    owned: BoolArray  # the same shape: which of them are the request's own
    copied: (
        IntArray  # [U] rows in compact head-pages; 0 until the forward has filled a unit that is not exact
    )
    stock: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # layer, or -1 -> head-pages
    filled: bool = False  # the forward is done

    @property
    def head_pages(self) -> int:
        return int(self.owned.sum()) + sum(map(len, self.stock.values()))

    def place(self, unit: int, layer: int, rows: int, page_tokens: int) -> NDArray[np.int64]:
        """The head-pages for `rows` rows of a unit, in order.  Called by the forward, once per unit.

        Raises RuntimeError if they are more than was promised.
        """
        pages = -(-rows // page_tokens)
        if self.chosen.exact[unit]:
            if rows != self.chosen.most[unit]:
                raise RuntimeError(f"kvir: unit {unit} selected {rows} rows, not {self.chosen.most[unit]}")
        else:
            stock = self.stock.get(layer, self.stock.get(-1, []))
            if rows > self.chosen.most[unit] or pages > len(stock):
                raise RuntimeError(
                    f"kvir: unit {unit} selected {rows} rows, {len(stock)} head-pages are left"
                )
            self.table[:pages, unit] = [stock.pop() for _ in range(pages)]
            self.owned[:pages, unit] = True
            self.copied[unit] = rows
        return self.table[:pages, unit].astype(np.int64)

    def decode_view(
        self, geometry: Geometry, tokens: int, recent: IntArray
    ) -> tuple[int, IntArray, IntArray]:
        """How a decode step at `tokens` tokens reads: (rows before its logical pages, sink [U], recent [U]);
        `recent` is the plan's own window of each unit.
        """
        chosen = self.chosen
        sinks = np.where(chosen.moves, self.copied, np.minimum(geometry.unit_sink_tokens, self.tokens))
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
        self._unsettled: list[Compact] = []

    @property
    def free_rows(self) -> int:
        return len(self._free)

    def needed_per_layer(self, chosen: Chosen) -> IntArray:
        """[layers + 1] head-pages that a selection takes, the last for any layer."""
        geo = self._cells.geometry
        pages = np.where(chosen.exact, -(-chosen.most // geo.page_tokens), 0)
        return chosen.stock + np.bincount(
            geo.layer_of_unit, weights=pages, minlength=geo.layer_count + 1
        ).astype(np.int64)

    def needed_rows(self, chosen: Chosen) -> int:
        """Spare rows that the copied rows, and the sinks of the other units, take."""
        geo = self._cells.geometry
        pages = -(-chosen.most // geo.page_tokens)
        return int(np.where(chosen.moves, pages, geo.unit_sink_pages).max(initial=0))

    def reserve(self, state: RequestState, chosen: Chosen, tokens: int) -> Compact:
        """Head-pages for the selection that runs when the request has `tokens` tokens."""
        geo, pool = self._cells.geometry, self._cells.pool
        count = self.needed_rows(chosen)
        if count > len(self._free):
            raise MemoryError("kvir: no spare rows in the residency table")
        spare = np.array([self._free.pop() for _ in range(count)], np.int64)
        copied = np.where(chosen.exact, chosen.most, 0)
        owned = np.arange(count)[:, None] < -(-copied // geo.page_tokens)[None]
        table = np.full((count, geo.unit_count), -1, np.int32)
        table[owned] = pool.take(np.broadcast_to(geo.layer_of_unit, owned.shape)[owned])
        layers = np.nonzero(chosen.stock)[0]
        stock = {
            -1 if layer == geo.layer_count else int(layer): pool.take(
                np.full(chosen.stock[layer], layer)
            ).tolist()
            for layer in layers
        }
        start = tokens // geo.page_tokens
        state.compact = Compact(chosen, tokens, start, spare, table, owned, copied, stock)
        self.head_pages += state.compact.head_pages
        if stock:
            self._unsettled.append(state.compact)
        self.refresh_sinks(state)
        return state.compact

    def publish(self, compact: Compact) -> None:
        """The forward has placed every unit: the device table learns of it before the next one."""
        compact.filled = True
        moved = compact.chosen.moves
        kept = int((compact.copied + compact.chosen.left)[moved].sum())
        self._cells.counters["selections"] += 1
        self._cells.counters["rows_evicted"] += int(moved.sum()) * compact.tokens - kept
        if compact.stock:
            self._cells.deltas.push(compact.spare_rows, compact.table.copy())

    def settle(self) -> None:
        """Give back what selections that are done did not use."""
        waiting, self._unsettled = self._unsettled, []
        for compact in waiting:
            if not compact.filled:
                self._unsettled.append(compact)
                continue
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
            alias = ~compact.chosen.moves & (geo.unit_sink_pages > i)
            compact.table[i, alias] = self._cells.table[state.pages[i], alias]
        self._cells.deltas.push(compact.spare_rows, compact.table.copy())

    def release(self, state: RequestState) -> None:
        compact, geo = state.compact, self._cells.geometry
        if compact is None:
            return
        state.compact = None
        self.head_pages -= compact.head_pages
        self._unsettled = [other for other in self._unsettled if other is not compact]
        layers = np.broadcast_to(geo.layer_of_unit, compact.owned.shape)[compact.owned]
        self._cells.pool.give(compact.table[compact.owned], layers, still_read=False)
        self._return_stock(compact)
        self._free.extend(compact.spare_rows.tolist())

    def _return_stock(self, compact: Compact) -> None:
        stock, compact.stock = compact.stock, {}
        for layer, pages in stock.items():
            self._cells.pool.give(np.array(pages, np.int32), np.full(len(pages), layer), still_read=False)
