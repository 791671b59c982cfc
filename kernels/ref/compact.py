"""Reference of `Compact`: one row after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvir.kernels.copy_ops import CopyKernels


def compact(k: Tensor, v: Tensor, rows: Tensor, kv: Tensor, pages: Tensor) -> int:
    """Copy `rows` of k, v [n, D] into head-pages of kv [N, 2, P, D]; returns their number.  See `Compact`."""
    size = kv.shape[2]
    if rows.numel() > pages.numel() * size:
        raise ValueError(f"{rows.numel()} rows do not fit in {pages.numel()} head-pages of {size}")
    if rows.numel() and ((rows.diff() <= 0).any() or rows[0] < 0 or rows[-1] >= k.shape[0]):
        raise ValueError(f"rows must ascend and lie in 0..{k.shape[0] - 1}")
    place = torch.arange(rows.numel(), device=rows.device)
    page, offset = pages[place // size].long(), place % size
    kv[page, 0, offset] = k[rows].to(kv.dtype)
    kv[page, 1, offset] = v[rows].to(kv.dtype)
    return rows.numel()


def copy_biases(bias: Tensor | None, rows: Tensor, to: Tensor, pages: Tensor) -> None:
    """The biases of `rows` (of bias float32 [n]; None: zeros) into `to` float32 [N, P], as `compact` places
    the rows."""
    place = torch.arange(rows.numel(), device=rows.device)
    page, offset = pages[place // to.shape[1]].long(), place % to.shape[1]
    to[page, offset] = 0.0 if bias is None else bias[rows]


def compact_units(k: Tensor, v: Tensor, rows: Sequence[Tensor], kv: Tensor, pages: Sequence[Tensor]) -> None:
    """One unit after the other.  See `CompactUnits`."""
    for unit, (mine, into) in enumerate(zip(rows, pages, strict=True)):
        compact(k[:, unit], v[:, unit], mine, kv, into.to(mine.device))


COPIES = CopyKernels("ref", compact_units)
