"""Scores from what observed queries attend to.  Shapes [Hkv, G, W, ...]; C are the candidates.

Observed queries are the last W of the sequence, all of them if there are fewer.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor
from torch.nn import functional

from kvir.kernels.ref.score_values import value_norms
from kvir.kernels.score_ops import ScoreInputs
from kvir.policy_ir.pools import AveragePool, MaxPool, PoolOrNone
from kvir.policy_ir.scores import Attention, LaProx, LastQuery, Reduce


def attention(spec: Attention, inputs: ScoreInputs) -> Tensor:
    """float32 [Hkv, C] (SnapKV, arXiv:2404.14469, and relatives)."""
    weights = window_weights(spec, inputs)  # [Hkv, G or 1, W, n]
    weights = _over_queries(weights, spec)  # [Hkv, G or 1, n]
    if spec.pool_at == "query_head":
        weights = _pooled(weights, spec.pool, spec.pool_over, inputs.candidates)
    scores = reduce(weights, spec.group, dim=1)
    if spec.pool_at == "kv_head":
        scores = _pooled(scores, spec.pool, spec.pool_over, inputs.candidates)
    return scores[:, slice(*inputs.candidates)]


def attention_rows(spec: Attention, inputs: ScoreInputs) -> Tensor:
    """float32 [Hkv, W, C]: the same before queries are reduced, one distribution per query, pooled."""
    weights = window_weights(spec, inputs)
    if spec.pool_at == "query_head":
        weights = _pooled(weights, spec.pool, spec.pool_over, inputs.candidates)
    scores = reduce(weights, spec.group, dim=1)
    if spec.pool_at == "kv_head":
        scores = _pooled(scores, spec.pool, spec.pool_over, inputs.candidates)
    return scores[..., slice(*inputs.candidates)]


def last_query(spec: LastQuery, inputs: ScoreInputs) -> Tensor:
    """float32 [Hkv, C] (TOVA, arXiv:2401.06104)."""
    return attention(Attention(window=1, group=spec.group), inputs)


def laprox(spec: LaProx, inputs: ScoreInputs) -> Tensor:
    """float32 [Hkv, C] (LaProx, arXiv:2605.07234, algorithm 1), not yet divided by the sum of the layer.

    Pooling is of the attention factor.
    """
    weights = window_weights(Attention(window=spec.window), inputs)
    seen = _over_queries(weights, Attention(window=spec.window, rows=spec.rows))
    seen = _pooled(seen, spec.pool, spec.pool_over, inputs.candidates)[..., slice(*inputs.candidates)]
    norms = value_norms(inputs, "l2", projected=True)
    match spec.group_at:
        case "products":
            return reduce(seen * norms, spec.group, dim=1)
        case "factors":
            return reduce(seen, spec.group, dim=1) * reduce(norms, spec.group, dim=1)
        case _:
            assert_never(spec.group_at)


# ---- parts -------------------------------------------------------------------------------------------------


def window_weights(spec: Attention, inputs: ScoreInputs) -> Tensor:
    """A of the observed queries: float32 [Hkv, G, W, n]; G or W is 1 where logits or queries are joined."""
    q, q_positions = observed(inputs, spec.window)
    if spec.queries == "mean":
        q, q_positions = q.mean(dim=0, keepdim=True), q_positions[-1:]
    logits = logits_of(q, inputs.k, inputs.scale, inputs.logit_cap)
    if inputs.bias is not None:
        logits = logits + inputs.bias.T[:, None, None].to(logits.dtype)
    if spec.group_at == "logits":
        logits = reduce(logits, spec.group, dim=1, keepdim=True)
    if spec.pool_at == "logits":
        logits = _pooled(logits, spec.pool, spec.pool_over, inputs.candidates)
    hidden = torch.zeros(q.shape[0], inputs.k.shape[0], dtype=torch.bool, device=q.device)
    if spec.causal:
        hidden |= row_positions(inputs)[None, :] > q_positions[:, None]
    if spec.softmax == "candidates":
        hidden[:, : inputs.candidates[0]] = True
        hidden[:, inputs.candidates[1] :] = True
    kind, logits = logits.dtype, logits.float()
    # only the last columns have a hidden place, as a rule: the others are not touched
    columns = hidden.any(dim=0).nonzero()[:, 0]
    if len(columns):
        first = int(columns[0])
        logits[..., first:].masked_fill_(hidden[:, first:], -torch.inf)  # its own tensor: in place
    weights = torch.softmax(logits, dim=-1)
    blind = hidden.all(dim=-1)
    if blind.any():  # a query before every candidate gives no weight, where all candidates share the mass
        weights = weights.masked_fill(blind[:, None], 0)
    return weights.to(kind)


def observed(inputs: ScoreInputs, window: int) -> tuple[Tensor, Tensor]:
    """The last `window` queries and their positions: [W, Hq, D], int64 [W].

    Raises ValueError if fewer are given than the sequence has.
    """
    n = inputs.k.shape[0]
    if inputs.q_obs is None or inputs.q_obs.shape[0] < min(window, n):
        given = 0 if inputs.q_obs is None else inputs.q_obs.shape[0]
        raise ValueError(f"{min(window, n)} observed queries are needed, {given} are given")
    positions = inputs.q_positions
    if positions is None:
        positions = row_positions(inputs)[-inputs.q_obs.shape[0] :]
    return inputs.q_obs[-window:], positions[-window:]


def row_positions(inputs: ScoreInputs) -> Tensor:
    """int64 [n]."""
    if inputs.positions is not None:
        return inputs.positions
    return torch.arange(inputs.k.shape[0], device=inputs.k.device)


def logits_of(q: Tensor, k: Tensor, scale: float, logit_cap: float) -> Tensor:
    """q [W, Hq, D], k [n, Hkv, D] -> [Hkv, G, W, n], scaled and capped."""
    grouped = q.view(q.shape[0], k.shape[1], -1, q.shape[2]).permute(1, 2, 0, 3)  # [Hkv, G, W, D]
    logits = torch.matmul(grouped.flatten(1, 2), k.permute(1, 2, 0)).unflatten(1, grouped.shape[1:3])
    logits = logits.mul_(scale)
    return logit_cap * torch.tanh(logits / logit_cap) if logit_cap > 0 else logits


def reduce(x: Tensor, how: Reduce, dim: int, *, keepdim: bool = False) -> Tensor:
    match how:
        case "mean":
            return x.mean(dim=dim, keepdim=keepdim)
        case "sum":
            return x.sum(dim=dim, keepdim=keepdim)
        case "max":
            return x.amax(dim=dim, keepdim=keepdim)
        case _:
            assert_never(how)


def pool(x: Tensor, how: PoolOrNone) -> Tensor:
    """Smooth the last dimension: stride 1, padding width // 2; an average counts padding as zeros."""
    flat = x.reshape(-1, 1, x.shape[-1])
    match how:
        case None:
            return x
        case AveragePool(width=width):
            smooth = functional.avg_pool1d(flat, width, stride=1, padding=width // 2)
        case MaxPool(width=width):
            smooth = functional.max_pool1d(flat, width, stride=1, padding=width // 2)
        case _:
            assert_never(how)
    return smooth.view(x.shape)


def _pooled(x: Tensor, how: PoolOrNone, over: str, candidates: tuple[int, int]) -> Tensor:
    """Pool all rows, or the candidates alone and leave the others as they are."""
    if how is None or candidates[0] == candidates[1]:
        return x
    if over == "all":
        return pool(x, how)
    rows = slice(*candidates)
    out = x.clone()
    out[..., rows] = pool(x[..., rows], how)
    return out


def _over_queries(weights: Tensor, spec: Attention) -> Tensor:
    """[Hkv, G, W, n] -> [Hkv, G, n]."""
    match spec.rows:
        case "mean":
            joined = weights.mean(dim=2)
        case "sum":
            joined = weights.sum(dim=2)
        case "max":
            joined = weights.amax(dim=2)
        case "l2":
            joined = weights.square().sum(dim=2).sqrt()
        case "squares":
            joined = weights.square().sum(dim=2)
        case _:
            assert_never(spec.rows)
    if spec.variance > 0 and weights.shape[2] > 1:
        joined = joined + spec.variance * weights.var(dim=2)  # of a sample: divided by W - 1
    return joined
