"""`kernels.ops.Append`: one program per token, all KV heads of the layer at once."""

from __future__ import annotations

import triton.language as tl

from kvir.kernels.triton.settings import kernel


@kernel("unit0", "logical_pages", "table_stride", "head_page_count")
def append_rows(
    k,  # [T, Hkv, D]
    v,
    kv,  # [N, 2, P, D], written
    bias,  # float32 [N, P], zeroed where rows are written, or anything
    table,  # int32 [L, U]
    slots,  # int64 [T]
    unit0,
    logical_pages,
    table_stride,
    head_page_count,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,  # padded
    D: tl.constexpr,
    DIM: tl.constexpr,
    P: tl.constexpr,
    BIAS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    page = slot // P
    offset = slot - page * P
    head = tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    # a negative slot may be divided towards zero: it is no row, whatever its page
    known = (head < KV_HEADS) & (slot >= 0) & (page < logical_pages)
    found = tl.load(table + page * table_stride + unit0 + head, mask=known, other=-1)
    kept = known & (found >= 0) & (found < head_page_count)
    mine = kept[:, None] & (d < D)[None, :]
    into = kv + found.to(tl.int64)[:, None] * (2 * P * D) + offset * D + d[None, :]
    rows_k = tl.load(k + token * k_stride + head[:, None] * k_head_stride + d[None, :], mask=mine, other=0.0)
    tl.store(into, rows_k, mask=mine)
    if BIAS:
        tl.store(bias + found.to(tl.int64) * P + offset, 0.0, mask=kept)
    rows_v = tl.load(v + token * v_stride + head[:, None] * v_head_stride + d[None, :], mask=mine, other=0.0)
    tl.store(into + P * D, rows_v, mask=mine)
