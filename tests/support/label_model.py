"""A "model" whose rows are labels: the row of token j for unit u is a hash of the whole prefix up to j and of
u.

A forward reads every row that its queries may see, layer by layer, in the order of a real forward (read the
layer, select, write the layer), and compares labels: a stale, foreign, overwritten or missing row is found at
once.
"""

from __future__ import annotations

import random
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
    random: random.Random

    def prepare_model(self) -> None:
        self.bounds = [
            (bounds.sink.tolist(), bounds.recent.tolist())
            for bounds in (self.pool.prefill_bounds, self.pool.decode_bounds)
        ]
        self.phased = self.allocator.residency.geometry.phased
        self.memory = self.pool.kv[:, 0, :, 0].numpy()
        self.memory[:] = -1

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
                    else:
                        self._read(table, row, hashes, start, end, unit, decode=decode)
                    if not decode and self.allocator.compacting[i] is not None:
                        self._compact(table, row, hashes, start, self.allocator.compacting[i], unit)
            if not decode:
                self._write(table, labels, spans, out, units)
        if not decode:
            for compact in self.allocator.compacting:
                if compact is not None:
                    pool.residency.compacts.publish(compact)

    def _write(
        self, table: Any, labels: list[Any], spans: list[tuple[int, int]], out: torch.Tensor, units: range
    ) -> None:
        slots = out.numpy()
        hashes = np.concatenate([h[start:end] for h, (start, end) in zip(labels, spans, strict=True)])
        for unit in units:
            head_pages = table[slots // P, unit]
            here = head_pages >= 0
            self.memory[head_pages[here], slots[here] % P] = (hashes[here] + unit) % LABELS

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
        got, want = self.memory[head_pages, seen % P], (hashes[seen] + unit) % LABELS
        assert (got == want).all(), f"unit {unit}: wrong row at {seen[got != want][:4]} of [{start}, {end})"

    def _decode_view(self, request: Request, end: int) -> Any:
        compact = self.allocator.residency.requests[id(request.kv)].compact
        if compact is None:
            return None
        recent = np.array(self.bounds[1][1])
        return compact, *compact.decode_view(self.allocator.residency.geometry, end, recent)

    def _kept(self, compact: Any, unit: int) -> np.ndarray:
        """Some rows of the prompt, as many as were placed: what scores would have chosen."""
        rng = np.random.default_rng([unit, compact.tokens])
        before = compact.tokens - int(compact.chosen.left[unit])
        return np.sort(rng.permutation(before)[: compact.copied[unit]])

    def _compact(self, table: Any, row: list[int], hashes: Any, start: int, compact: Any, unit: int) -> None:
        """Copy survivors: rows of the prefix from the pool, rows of the chunk as they were computed."""
        if not compact.chosen.moves[unit]:
            return
        rows = int(compact.chosen.most[unit])
        layer = unit // self.pool.plan.layout.kv_heads
        if not compact.chosen.exact[unit]:
            rivals = compact.stock.get(layer, compact.stock.get(-1, []))
            rows = self.random.randrange(min(rows, len(rivals) * P) + 1)
        compact.place(unit, layer, rows, P)
        kept = self._kept(compact, unit)
        old = kept[kept < start]
        if len(old):
            source = table[np.array(row)[old // P], unit]
            assert (self.memory[source, old % P] == (hashes[old] + unit) % LABELS).all()
        place = np.arange(len(kept))
        self.memory[compact.table[place // P, unit], place % P] = (hashes[kept] + unit) % LABELS

    def _read_compact(
        self, table: Any, row: list[int], hashes: Any, request: Request, view: Any, end: int, unit: int
    ) -> None:
        compact, before, sinks, recents = view
        pages = np.concatenate([compact.spare_rows, row])
        last = before + end
        seen = np.concatenate([np.arange(sinks[unit]), np.arange(last - recents[unit], last)])
        positions = seen - before
        if compact.chosen.moves[unit]:
            positions[: sinks[unit]] = self._kept(compact, unit)
        else:
            positions[: sinks[unit]] = np.arange(sinks[unit])
        assert len(np.unique(positions)) == len(positions), f"unit {unit} reads a row twice"
        head_pages = table[pages[seen // P], unit]
        assert (head_pages >= 0).all(), f"unit {unit}: hole at {positions[head_pages < 0][:4]} of {end}"
        got, want = self.memory[head_pages, seen % P], (hashes[positions] + unit) % LABELS
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
