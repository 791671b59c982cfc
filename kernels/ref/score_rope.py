"""Rotation by position (RoPE): applied, undone, and averaged over positions."""

from __future__ import annotations

import torch
from torch import Tensor

from kvir.kernels.score_ops import Rope


def rotate(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """x [n, H, D] turned to `positions` [n]."""
    cos, sin = rope.cos[positions][:, None], rope.sin[positions][:, None]
    return _turn(x, cos, sin, rope.interleaved)


def unrotate(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """The inverse of `rotate`."""
    cos, sin = rope.cos[positions][:, None], rope.sin[positions][:, None]
    square = cos * cos + sin * sin  # 1, unless the tables are scaled
    return _turn(x, cos / square, -sin / square, rope.interleaved)


def mean_rotation(rope: Rope, first: int, count: int, head_dim: int) -> Tensor:
    """float32 [D, D]: the mean R of the rotation matrices of `count` positions from `first` on; R q turns q.

    Positions behind the end of the tables, where the model has no queries, do not count; if all are, the last
    one does.
    """
    first = min(first, rope.cos.shape[0] - 1)
    cos = rope.cos[first : first + count].mean(dim=0)
    sin = rope.sin[first : first + count].mean(dim=0)
    identity = torch.eye(head_dim, dtype=cos.dtype, device=cos.device)[:, None]
    return _turn(identity, cos, sin, rope.interleaved)[:, 0].T.contiguous()


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    out = x.clone()
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        out[..., 0 : 2 * half : 2] = first * cos - second * sin
        out[..., 1 : 2 * half : 2] = second * cos + first * sin
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
        out[..., :half] = first * cos - second * sin
        out[..., half : 2 * half] = second * cos + first * sin
    return out
