"""The rows that units hold, read from the pool as they are before a selection writes: always copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvir.sglang_ext.compact import Compact
from kvir.sglang_ext.geometry import IntArray
from kvir.sglang_ext.pool import KvirPool


@dataclass(frozen=True)
class HeldRows:
    """Heads that hold the same rows, in the order of positions."""

    k: torch.Tensor  # [n, heads, D]
    v: torch.Tensor
    positions: torch.Tensor | None = None  # int64 [n]; None: 0 .. n - 1
    bias: torch.Tensor | None = None  # float32 [n], of one head; None: zeros

    def of(self, *heads: int) -> HeldRows:
        """Some of the heads, at least one, still [n, heads, D]; a view where they follow each other."""
        run = range(heads[0], heads[0] + len(heads))
        which = slice(run.start, run.stop) if heads == tuple(run) else list(heads)
        return HeldRows(self.k[:, which], self.v[:, which], self.positions)


class RowReader:
    """Units are (layer, KV head of the model)."""

    def __init__(self, pool: KvirPool) -> None:
        self._pool = pool
        self._kv_heads, self._heads = pool.plan.layout.kv_heads, pool.residency.geometry.own_heads

    def prompt(self, layer: int, pages: IntArray, start: int, k: torch.Tensor, v: torch.Tensor) -> HeldRows:
        """This rank's heads, all tokens so far: `start` from the pool, then the chunk k, v [T, Hkv, D]."""
        if not start:
            return HeldRows(k, v)
        before = self.layer(layer, pages, start)
        return HeldRows(torch.cat([before.k, k]), torch.cat([before.v, v]))

    def before(
        self, unit: tuple[int, int], pages: IntArray, tokens: int, compact: Compact | None
    ) -> HeldRows:
        """One unit as the first `tokens` tokens have left it."""
        if not tokens:
            return self._none()
        if compact is None:
            return self.dense(unit, pages, tokens)
        return self.unit(unit, pages, tokens, compact)

    def _none(self) -> HeldRows:
        """One head that holds nothing."""
        empty = self._pool.kv.new_empty((0, 1, self._pool.kv.shape[-1]))
        return HeldRows(empty, empty, empty.new_empty(0, dtype=torch.int64))

    def layer(self, layer: int, pages: IntArray, tokens: int) -> HeldRows:
        """All heads of this rank, from the dense pages of the first `tokens` tokens."""
        pool, unit = self._pool, layer * len(self._heads)
        logical = self._there(pages[: -(-tokens // pool.page_size)])
        head_pages = pool.table[logical, unit : unit + len(self._heads)].long()
        # [pages, Hkv, 2, P, D] -> [2, pages * P, Hkv, D]
        rows = pool.kv[head_pages].permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :tokens]
        return HeldRows(rows[0], rows[1])

    def dense(self, unit: tuple[int, int], pages: IntArray, tokens: int) -> HeldRows:
        """One unit, from the dense pages of the first `tokens` tokens."""
        return self._one(self._dense_pages(unit, pages, 0, tokens), 0, tokens, None)

    def unit(self, unit: tuple[int, int], pages: IntArray, tokens: int, compact: Compact) -> HeldRows:
        """One unit that has selected before: its compact rows, then its dense ones."""
        number = unit[0] * self._kv_heads + unit[1]
        if not compact.moved[number]:
            return self.dense(unit, pages, tokens)
        first = int(compact.tokens[number] - compact.left[number])
        start = int(compact.start_page[number])
        size = self._pool.page_size
        dense = self._one(
            self._dense_pages(unit, pages, start, tokens), first - start * size, tokens - start * size, None
        )
        copied = int(compact.copied[number])
        own = self._there(compact.table[: -(-copied // size), number].astype("int64"))
        old = self._one(own, 0, copied, None)
        positions = self._there(compact.held_positions(number, tokens))
        bias = None
        if self._pool.bias is not None:
            merged = self._pool.bias[own].flatten()[:copied]
            bias = torch.cat([merged, merged.new_zeros(dense.k.shape[0])])
        return HeldRows(torch.cat([old.k, dense.k]), torch.cat([old.v, dense.v]), positions, bias)

    def _dense_pages(self, unit: tuple[int, int], pages: IntArray, first: int, tokens: int) -> torch.Tensor:
        logical = self._there(pages[first : -(-tokens // self._pool.page_size)])
        layer, head = unit[0], unit[1] - self._heads.start
        return self._pool.table[logical, layer * len(self._heads) + head].long()

    def _there(self, numbers: IntArray) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._pool.kv.device)

    def _one(
        self, head_pages: torch.Tensor, start: int, stop: int, positions: torch.Tensor | None
    ) -> HeldRows:
        """Rows [start, stop) of head-pages in order."""
        rows = self._pool.kv[head_pages].transpose(0, 1).flatten(1, 2)[:, start:stop]
        return HeldRows(rows[0][:, None], rows[1][:, None], positions)
