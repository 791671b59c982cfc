"""Norms of values, plain or through the output projection, per query head.

A row's share of the layer's output through query head h is A[q, j] * (v_j W_O^h), W_O^h [D, hidden] being the
block of the output projection that reads head h.  |v W_O^h|_2 = sqrt(v M v') with the Gram matrix
M = W_O^h W_O^h' [D, D]: D / hidden of the work, and W_O is not needed any more.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvir.kernels.score_ops import ScoreInputs
from kvir.policy_ir.scores import Norm

ORDER: dict[Norm, int] = {"l1": 1, "l2": 2}


def gram(w_o: Tensor) -> Tensor:
    """w_o [Hq, D, hidden] -> float32 [Hq, D, D]; the products are summed in float64."""
    wide = w_o.double()
    return (wide @ wide.transpose(1, 2)).float()


def projected_norms(v: Tensor, w_o: Tensor, norm: Norm) -> Tensor:
    """|v_j W_O^h|: v [n, Hkv, D], w_o [Hq, D, hidden] -> float32 [Hq, n]."""
    group = w_o.shape[0] // v.shape[1]
    norms = [
        torch.linalg.vector_norm(v[:, head // group].float() @ w_o[head].float(), ORDER[norm], dim=-1)
        for head in range(w_o.shape[0])
    ]
    return torch.stack(norms)


def projected_norms_gram(v: Tensor, gram: Tensor) -> Tensor:
    """|v_j W_O^h|_2 by the Gram trick: v [n, Hkv, D], gram [Hq, D, D] -> float32 [Hq, n]."""
    group = gram.shape[0] // v.shape[1]
    rows = v.float().transpose(0, 1).repeat_interleave(group, dim=0)  # [Hq, n, D]
    squares = ((rows @ gram) * rows).sum(dim=-1)
    return squares.clamp_min(0).sqrt()  # rounding may leave a small negative


def value_norms(inputs: ScoreInputs, norm: Norm, *, projected: bool) -> Tensor:
    """float32 [Hkv, G, C] of the candidates; G is 1 if not projected.  Norms kept at append are taken first.

    Raises ValueError if there is nothing to compute them from.
    """
    rows = slice(*inputs.candidates)
    kv_heads = inputs.v.shape[1]
    if not projected:
        return torch.linalg.vector_norm(inputs.v[rows].float(), ORDER[norm], dim=-1).T[:, None]
    if norm in inputs.projected:
        found = inputs.projected[norm][:, rows].float()
    elif norm == "l2" and inputs.gram is not None:
        found = projected_norms_gram(inputs.v[rows], inputs.gram)
    elif inputs.w_o is not None:
        found = projected_norms(inputs.v[rows], inputs.w_o, norm)
    else:
        raise ValueError(f"the {norm} norms of projected values, or `w_o`, are missing")
    return found.unflatten(0, (kv_heads, -1))
