"""Rows that stay, copied into the compact head-pages of their units."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvir.kernels.copy_ops import CopyKernels
from kvir.kernels.ref.compact import copy_biases
from kvir.kernels.ref.select_offer import Unit
from kvir.sglang_ext.forwards import Work
from kvir.sglang_ext.held_rows import HeldRows
from kvir.sglang_ext.pool import KvirPool


class RowCopier:
    """Into one pool."""

    def __init__(self, pool: KvirPool, copies: CopyKernels) -> None:
        self._pool, self._copies = pool, copies
        self._kv_heads = pool.plan.layout.kv_heads

    def copy(
        self, work: Work, units: Sequence[Unit], kept: Sequence[torch.Tensor] | None, held: HeldRows
    ) -> None:
        """Fill the compact head-pages of units, which are the heads of `held`, in its order, with the kept
        ones of its rows; None: all of them.  The host, which has the books, is told once for all of them.
        """
        chosen = None if work.compact is None else work.compact.chosen
        if work.compact is None or chosen is None:
            return
        numbers = [layer * self._kv_heads + head for layer, head in units]
        mine = [i for i, number in enumerate(numbers) if chosen.moves[number]]
        if not mine:
            return
        if kept is None:
            kept = [torch.arange(held.k.shape[0], device=held.k.device)] * len(units)
        positions = [kept[i] if held.positions is None else held.positions[kept[i]] for i in mine]
        known = torch.cat(positions).cpu().numpy()
        rows, pages = list[torch.Tensor](), list[torch.Tensor]()
        for i, of_unit in zip(
            mine, np.split(known, np.cumsum([len(p) for p in positions])[:-1]), strict=True
        ):
            number = numbers[i]
            count = np.searchsorted(of_unit, int(chosen.at[number] - chosen.left[number]))
            rows.append(kept[i][: int(count)])
            pages.append(torch.from_numpy(work.compact.place(number, of_unit[:count])))
        together = held.of(*mine)
        self._copies.compact_units(together.k, together.v, rows, self._pool.kv, pages)
        if self._pool.bias is not None:
            for of_unit, into in zip(rows, pages, strict=True):
                copy_biases(held.bias, of_unit, self._pool.bias, into.to(of_unit.device))
