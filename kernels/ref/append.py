"""Reference of `Append`: one row at a time is what it means; index arithmetic is how it is done."""

from __future__ import annotations

from torch import Tensor

from kvir.kernels.ops import Cache


def append(k: Tensor, v: Tensor, cache: Cache, slots: Tensor, unit0: int) -> None:
    """Write k, v [T, Hkv, D] to the rows that `slots` name, where the unit has a head-page for them.

    A slot that is negative or past the table names no row: it is dropped like a row without a head-page.
    """
    rows = cache.kv.shape[2]
    known = (slots >= 0) & (slots < cache.table.shape[0] * rows)
    page, offset = slots.clamp(0, cache.table.shape[0] * rows - 1) // rows, slots % rows
    for head in range(k.shape[1]):
        head_page = cache.table[page, unit0 + head].long()
        kept = known & (head_page >= 0) & (head_page < cache.kv.shape[0])
        cache.kv[head_page[kept], 0, offset[kept]] = k[kept, head]
        cache.kv[head_page[kept], 1, offset[kept]] = v[kept, head]
        if cache.bias is not None:
            cache.bias[head_page[kept], offset[kept]] = 0
