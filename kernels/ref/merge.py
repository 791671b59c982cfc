"""Reference of `MergeRows`: rows that go are averaged into rows that stay.

The idea is Hard-KV's (arXiv:2606.28831, condensing); its code builds merges that it never uses, so the
conventions are ours, and fields of the language.  With s[r, j] the logit of row j for reference query r, bias
included, lse_r of all rows, A[r, j] = exp(s[r, j] - lse_r), and g the rows that become one:

    w_j  = sum_r A[r, j] / sum_r sum_(i in g) A[r, i]          (or 1 / |g|)
    v'   = sum_j w_j v_j          k' = sum_j w_j k_j  (or k of the row that stays)
    b'   = log sum_r sum_(j in g) A[r, j] - log sum_r exp(q_r k' - lse_r)

So the attention that the reference queries give the group is what it was, in sum; for one query its
log-sum-exp and its output are exact.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from kvir.kernels.ref.score_attention import logits_of
from kvir.policy_ir.rules import Merge


def merge_rows(
    spec: Merge,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    positions: Tensor,
    stay: Tensor,
    into: Tensor,
    q: Tensor,
    q_positions: Tensor,
    scale: float,
    logit_cap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """k, v [len(stay), D] and bias [len(stay)] of the rows that stay.  Shapes as in `MergeRows`."""
    going = torch.ones(k.shape[0], dtype=torch.bool, device=k.device)
    going[stay] = False
    losers = going.nonzero()[:, 0]
    if not len(losers) or not len(into):
        return k[stay], v[stay], bias[stay]
    keys, values = k.float(), v.float()
    hidden = (positions[None, :] > q_positions[:, None])[:, None]  # [R, 1, n]
    logits = (_logits(q, keys, scale, logit_cap) + bias).masked_fill(hidden, -torch.inf)
    lse = logits.logsumexp(-1, keepdim=True)  # [R, G, 1]
    mass = torch.exp(logits - lse).sum((0, 1))  # [n]
    target = _targets(spec, mass, losers, into)
    group = torch.arange(k.shape[0], device=k.device)  # the row that stays, of every row of a group
    group[losers] = target
    weights = _weights(spec, mass, group)
    new_v = torch.zeros_like(values).index_add_(0, group, weights[:, None] * values)
    new_k = keys
    if spec.keys == "average":
        new_k = torch.zeros_like(keys).index_add_(0, group, weights[:, None] * keys)
    new_bias = bias.clone()
    changed = target.unique()
    if spec.bias == "lse":
        had = torch.zeros_like(mass).index_add_(0, group, mass)[changed]
        seen = _logits(q, new_k[changed], scale, logit_cap) - lse
        got = torch.exp(seen.masked_fill(hidden[..., changed], -torch.inf)).sum((0, 1))
        known = (had > 0) & (got > 0)
        new_bias[changed] = torch.where(known, torch.log(had) - torch.log(got), bias[changed])
    # rows that nothing joins are as they were, to the bit
    out_k, out_v = k.clone(), v.clone()
    out_k[changed], out_v[changed] = new_k[changed].to(k.dtype), new_v[changed].to(v.dtype)
    return out_k[stay], out_v[stay], new_bias[stay]


def _targets(spec: Merge, mass: Tensor, losers: Tensor, into: Tensor) -> Tensor:
    """The row that stays, for each that goes."""
    match spec.into:
        case "one":
            return into[mass[into].argmin()].expand(len(losers))
        case "neighbour":
            after = torch.searchsorted(into, losers).clamp_max(len(into) - 1)
            return into[after]
        case "pairwise":
            count = min(len(losers), len(into))
            # in the order of positions: a ranking of all rows would hang on the last bits of their masses
            least = into[torch.argsort(mass[into], stable=True)[:count].sort().values]
            return least[torch.arange(len(losers), device=losers.device) * count // len(losers)]
        case _:
            assert_never(spec.into)


def _weights(spec: Merge, mass: Tensor, group: Tensor) -> Tensor:
    """Of every row in its group: they add up to 1.  A group without attention is averaged equally."""
    counts = torch.zeros_like(mass).index_add_(0, group, torch.ones_like(mass))
    equal = 1 / counts[group]
    match spec.weights:
        case "equal":
            return equal
        case "attention":
            total = torch.zeros_like(mass).index_add_(0, group, mass)[group]
            return torch.where(total > 0, mass / total.clamp_min(1e-30), equal)
        case _:
            assert_never(spec.weights)


def _logits(q: Tensor, k: Tensor, scale: float, logit_cap: float) -> Tensor:
    """q [R, G, D], k [n, D] -> [R, G, n], scaled and capped."""
    return logits_of(q.float(), k[:, None], scale, logit_cap)[0].transpose(0, 1)
