"""Copy kept rows of many units into head-pages, in order: one program per unit and block of kept rows.

How many rows a unit keeps is read on the device, so the host need not know what a selection chose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvir.kernels.copy_ops import CopyKernels
from kvir.kernels.triton.settings import kernel, padded

BLOCK_ROWS = 32


@kernel("stored", "head_page_count", "page_count", "rows_stride", "pages_stride")
def gather_rows(
    k,  # [n, units, D]
    v,
    rows,  # int64 [units, most]: the first counts[u] of each are kept
    counts,  # int32 [units]
    kv,  # [N, 2, P, D], written
    pages,  # int32 [units, pages]: head-pages
    stored,  # n
    head_page_count,
    page_count,
    rows_stride,
    pages_stride,
    k_stride,
    k_unit_stride,
    v_stride,
    v_unit_stride,
    D: tl.constexpr,
    DIM: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Row i of unit u goes to `pages[u, i // P]` at offset i % P."""
    unit = tl.program_id(0)
    i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DIM)
    kept = (i < tl.load(counts + unit)) & (i // P < page_count)
    row = tl.load(rows + unit * rows_stride + i, mask=kept, other=0).to(tl.int64)
    page = tl.load(pages + unit * pages_stride + i // P, mask=kept, other=-1)
    kept = kept & (row >= 0) & (row < stored) & (page >= 0) & (page < head_page_count)
    mine = kept[:, None] & (d < D)[None, :]
    into = kv + (page.to(tl.int64) * (2 * P * D) + (i % P) * D)[:, None] + d[None, :]
    of_k = k + row[:, None] * k_stride + unit * k_unit_stride + d[None, :]
    tl.store(into, tl.load(of_k, mask=mine, other=0.0), mask=mine)
    of_v = v + row[:, None] * v_stride + unit * v_unit_stride + d[None, :]
    tl.store(into + P * D, tl.load(of_v, mask=mine, other=0.0), mask=mine)


def compact(k: Tensor, v: Tensor, rows: Tensor, kv: Tensor, pages: Tensor) -> int:
    """`kernels.copy_ops.Compact`."""
    size = kv.shape[2]
    if rows.numel() > pages.numel() * size:
        raise ValueError(f"{rows.numel()} rows do not fit in {pages.numel()} head-pages of {size}")
    if rows.numel() and ((rows.diff() <= 0).any() or rows[0] < 0 or rows[-1] >= k.shape[0]):
        raise ValueError(f"rows must ascend and lie in 0..{k.shape[0] - 1}")
    compact_units(k[:, None], v[:, None], [rows], kv, [pages])
    return rows.numel()


def compact_units(k: Tensor, v: Tensor, rows: Sequence[Tensor], kv: Tensor, pages: Sequence[Tensor]) -> None:
    """`kernels.copy_ops.CompactUnits`, in one launch."""
    device = k.device
    counts = torch.tensor([len(mine) for mine in rows], dtype=torch.int32).to(device)
    into = pad_sequence([ids.to(torch.int32) for ids in pages], batch_first=True, padding_value=-1)
    launch_compact(k, v, pad_sequence(list(rows), batch_first=True), counts, kv, into.to(device))


def launch_compact(k: Tensor, v: Tensor, rows: Tensor, counts: Tensor, kv: Tensor, pages: Tensor) -> None:
    """Copy the first `counts[u]` of `rows[u]` of each unit into `pages[u]`; nothing is read on the host.

    k, v [n, units, D]; rows int64 [units, most]; counts int32 [units]; kv [N, 2, P, D], written; pages int32
    [units, pages].  Rows and head-pages out of range are left out.
    """
    if rows.shape[1] == 0:
        return
    if not (k.dtype is v.dtype is kv.dtype) or not (k.stride(-1) == v.stride(-1) == rows.stride(-1) == 1):
        raise ValueError("k, v and kv must have one dtype, rows and the last dimensions be contiguous")
    head_dim = kv.shape[3]
    gather_rows[(k.shape[1], triton.cdiv(rows.shape[1], BLOCK_ROWS))](
        k, v, rows, counts, kv, pages, k.shape[0], kv.shape[0], pages.shape[1],
        rows.stride(0), pages.stride(0), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        D=head_dim, DIM=padded(head_dim), P=kv.shape[2], ROWS=BLOCK_ROWS,
    )  # fmt: skip


COPIES = CopyKernels("triton", compact_units)
