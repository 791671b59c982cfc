"""A "model" whose rows are labels: the row of token j for unit u is a hash of the whole prefix up to j and of
u.

A forward reads every row that its queries may see, layer by layer, in the order of a real forward (read the
layer, select, write the layer), and compares labels: a stale, foreign, overwritten or missing row is found at
once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from kvir.kernels.ops import FULL
from kvir.sglang_ext.allocator import KvirAllocator
from kvir.sglang_ext.pool import KvirPool
from support.prefix_tree import P, Request

LABELS = 1 << 22


class LabelModel:
    pool: KvirPool
    allocator: KvirAllocator

    def prepare_model(self) -> None:
        self.bounds = [
            (bounds.sink.tolist(), bounds.recent.tolist())
            for bounds in (self.pool.prefill_bounds, self.pool.decode_bounds)
        ]
        self.phased = self.allocator.residency.geometry.phased
        geometry = self.pool.residency.geometry
        shape = geometry.ranks.count, *self.pool.kv[:, 0, :, 0].shape
        memory = np.full(shape, -1, np.float32)
        self.memory = [memory[rank] for rank in geometry.rank_of_unit]  # of each unit: that of its rank
        self._random = np.random.default_rng(0)

    def _forward(
        self, batch: list[Request], spans: list[tuple[int, int]], out: torch.Tensor, *, decode: bool
    ) -> None:
        pool = self.pool
        shadows = pool.residency.deltas.apply(pool.table, pool.shadow_base)
        table = pool.table.numpy()
        labels = [self._labels(request) for request in batch]
        rows = []
        for i, (request, (start, _)) in enumerate(zip(batch, spans, strict=True)):
            row = list(request.row)
            if i in shadows:
                row[start // P] = pool.shadow_base + i
            rows.append(row)
        heads = pool.plan.layout.kv_heads
        views = [
            self._decode_view(r, end) if decode else None for r, (_, end) in zip(batch, spans, strict=True)
        ]
        for layer in range(pool.residency.geometry.layer_count):
            units = range(layer * heads, layer * heads + heads)
            if decode:
                self._write(table, labels, spans, out, units)
            for i, (row, hashes, (start, end)) in enumerate(zip(rows, labels, spans, strict=True)):
                for unit in units:
                    if views[i] is not None:
                        self._read_compact(table, row, hashes, batch[i], views[i], end, unit)
                    elif (old := self._folded(batch[i], unit)) is not None:
                        self._held(table, row, hashes, start, old, unit)
                    else:
                        self._read(table, row, hashes, start, end, unit, decode=decode)
                    compact: Any = self.allocator.compacting[i]
                    if compact is not None and compact.chosen.moves[unit]:
                        self._compact(table, row, hashes, end if decode else start, compact, unit)
            if not decode:
                self._write(table, labels, spans, out, units)
        for compact in self.allocator.compacting:
            if compact is not None:
                pool.residency.compacts.publish(compact)

    def _folded(self, request: Request, unit: int) -> Any:
        """The compact rows of a request whose prompt is still read, if the unit has some."""
        compact = self.allocator.residency.requests[id(request.kv)].compact
        return compact if compact is not None and compact.moved[unit] else None

    def _write(
        self, table: Any, labels: list[Any], spans: list[tuple[int, int]], out: torch.Tensor, units: range
    ) -> None:
        slots = out.numpy()
        hashes = np.concatenate([h[start:end] for h, (start, end) in zip(labels, spans, strict=True)])
        for unit in units:
            head_pages = table[slots // P, unit]
            here = head_pages >= 0
            self.memory[unit][head_pages[here], slots[here] % P] = (hashes[here] + unit) % LABELS

    def _read(
        self, table: Any, row: list[int], hashes: Any, start: int, end: int, unit: int, *, decode: bool
    ) -> None:
        """Rows below `start` (below `end` in decode) that any query in [start, end) sees must be there and be
        right.
        """
        below = end if decode else start
        sinks, recents = self.bounds[decode]
        low = 0 if recents[unit] == FULL else max(0, (end - 1 if decode else start) - recents[unit] + 1)
        seen = np.concatenate([np.arange(min(sinks[unit], low, below)), np.arange(min(low, below), below)])
        if not len(seen):
            return
        head_pages = table[np.array(row)[seen // P], unit]
        assert (head_pages >= 0).all(), f"unit {unit}: hole at {seen[head_pages < 0][:4]} of [{start}, {end})"
        got, want = self.memory[unit][head_pages, seen % P], (hashes[seen] + unit) % LABELS
        assert (got == want).all(), f"unit {unit}: wrong row at {seen[got != want][:4]} of [{start}, {end})"

    def _decode_view(self, request: Request, end: int) -> Any:
        compact = self.allocator.residency.requests[id(request.kv)].compact
        if compact is None:
            return None
        recent = np.array(self.bounds[1][1])
        return compact, *compact.decode_view(end, recent)

    def _compact(
        self, table: Any, row: list[int], hashes: Any, written: int, compact: Any, unit: int
    ) -> None:
        """Copy survivors: rows below `written` from the pool, rows of a chunk as they were computed."""
        at = int(compact.chosen.at[unit])
        held = self._held(table, row, hashes, min(written, at), compact, unit)
        held = np.concatenate([held, np.arange(min(written, at), at)])
        before = held[held < at - compact.chosen.left[unit]]
        kept = np.sort(self._random.permutation(before)[: self._count(compact, unit, len(before))])
        compact.place(unit, kept)
        place = np.arange(len(kept))
        self.memory[unit][compact.table[place // P, unit], place % P] = self._row(hashes, kept, unit)

    def _held(
        self, table: Any, row: list[int], hashes: Any, written: int, compact: Any, unit: int
    ) -> np.ndarray:
        """Positions of the rows that a unit which selects has in the pool; all of them must be right."""
        first, old = 0, np.arange(0)
        if compact.moved[unit]:
            first, old = int(compact.tokens[unit] - compact.left[unit]), compact.positions[unit]
            place = np.arange(len(old))
            copies = self.memory[unit][compact.table[place // P, unit], place % P]
            assert (copies == self._row(hashes, old, unit)).all(), f"unit {unit}: wrong compact rows"
        dense = np.arange(first, written)
        heads = table[np.array(row, np.int64)[dense // P], unit]
        assert (heads >= 0).all(), f"unit {unit}: hole at {dense[heads < 0][:4]}"
        assert (self.memory[unit][heads, dense % P] == self._row(hashes, dense, unit)).all()
        return np.concatenate([old, dense])

    def _count(self, compact: Any, unit: int, held: int) -> int:
        """How many rows a unit wins: what the plan says, or what its rivals left it, drawn at random."""
        rows = min(held, int(compact.chosen.most[unit]))
        if compact.chosen.exact[unit]:
            return rows
        lane = int(compact.geometry.lane_of_unit[unit])
        stock = compact.stock.get(lane, compact.stock.get(compact.geometry.any_lane(lane), []))
        limit = (int(compact.owned[:, unit].sum()) + len(stock)) * P
        return int(self._random.integers(min(rows, limit) + 1))

    @staticmethod
    def _row(hashes: Any, positions: np.ndarray, unit: int) -> np.ndarray:
        return (hashes[positions] + unit) % LABELS

    def _read_compact(
        self, table: Any, row: list[int], hashes: Any, request: Request, view: Any, end: int, unit: int
    ) -> None:
        compact, before, sinks, recents = view
        pages = np.concatenate([compact.spare_rows, row])
        last = before + end
        seen = np.concatenate([np.arange(sinks[unit]), np.arange(last - recents[unit], last)])
        positions = seen - before
        if compact.moved[unit]:
            positions[: sinks[unit]] = compact.positions[unit]
        else:
            positions[: sinks[unit]] = np.arange(sinks[unit])
        assert len(np.unique(positions)) == len(positions), f"unit {unit} reads a row twice"
        head_pages = table[pages[seen // P], unit]
        assert (head_pages >= 0).all(), f"unit {unit}: hole at {positions[head_pages < 0][:4]} of {end}"
        got, want = self.memory[unit][head_pages, seen % P], (hashes[positions] + unit) % LABELS
        assert (got == want).all(), f"unit {unit}: wrong row at {positions[got != want][:4]} of {end}"

    def _labels(self, request: Request) -> np.ndarray:
        """Rows that decode computes under narrower windows are other rows than prefill would compute."""
        out, h = np.empty(len(request.tokens), np.int64), 7
        for i, token in enumerate(request.tokens):
            if self.phased and i == request.prompt_tokens:
                h += 99
            h = (h * 1000003 + token + 1) % 2147483647
            out[i] = h % LABELS
        return out
