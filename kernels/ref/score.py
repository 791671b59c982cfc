"""Reference of `ScoreRows` and `ScoreParts`: one function per score of the language."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import floor
from typing import Literal, assert_never

import torch
from torch import Tensor

from kvir.kernels.ref import score_attention, score_expected, score_rows
from kvir.kernels.ref.score_running import running_score
from kvir.kernels.ref.score_values import value_norms
from kvir.kernels.score_ops import ScoreInputs
from kvir.policy_ir.scores import (
    Accumulated,
    Attention,
    CriticalKV,
    Cur,
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    LagKV,
    LaProx,
    LastQuery,
    Leverage,
    Noncausal,
    Part,
    Persistent,
    Random,
    Redundancy,
    Rkv,
    Score,
    Sum,
    ValueLeverage,
    ValueWeighted,
)

Precision = Literal["float32", "model"]
Leaf = (
    Attention
    | LastQuery
    | Accumulated
    | Persistent
    | Noncausal
    | ExpectedAttention
    | KeyNorm
    | KeyDiff
    | LagKV
    | Cur
    | Leverage
    | ValueLeverage
    | Redundancy
    | Random
    | LaProx
)


def score(spec: Score, inputs: ScoreInputs, precision: Precision = "float32") -> Tensor:
    """float32 [Hkv, n]; -inf for rows that are no candidates.

    `precision: model` takes logits, and weights after their softmax, in the type of k; the softmax itself and
    all scores that read no queries are float32 always.  Raises ValueError if something is missing.
    """
    return score_parts(spec, [inputs], precision)[0]


def score_parts(spec: Score, parts: Sequence[ScoreInputs], precision: Precision = "float32") -> list[Tensor]:
    """The same for a layer in parts, KV heads with equally many rows each: float32 [Hkv, n] per part."""
    for part in parts:
        start, stop = part.candidates
        if not 0 <= start <= stop <= part.k.shape[0]:
            raise ValueError(f"the candidates {start}..{stop} are no run of the {part.k.shape[0]} rows")
    filled = [part for part in parts if part.candidates[0] < part.candidates[1]]
    found = iter(_layer_scores(spec, [_cast(part, precision) for part in filled]))
    scores = []
    for part in parts:
        start, stop = part.candidates
        out = torch.full((part.k.shape[1], part.k.shape[0]), -torch.inf, device=part.k.device)
        if start < stop:
            out[:, start:stop] = next(found).float()
        scores.append(out)
    return scores


def score_per_query(spec: Score, inputs: ScoreInputs, precision: Precision = "float32") -> Tensor:
    """float32 [Hkv, W, C], candidates only: one ranking per observed query, for `rows: union` of `top_p`.

    Raises ValueError for a score that has none.
    """
    inputs = _cast(inputs, precision)
    match spec:
        case Attention():
            return score_attention.attention_rows(spec, inputs).float()
        case LastQuery(group=group):
            return score_attention.attention_rows(Attention(window=1, group=group), inputs).float()
        case Rkv(weight=weight, importance=importance, redundancy=redundancy):
            seen = score_per_query(importance, inputs, precision)
            alike = score_rows.redundancy(redundancy, inputs)
            return weight * seen + (1 - weight) * alike[:, None]
        case _:
            raise ValueError(f"`rows: union` needs a score per query, which {type(spec).__name__} has not")


def _layer_scores(spec: Score, parts: Sequence[ScoreInputs]) -> list[Tensor]:
    """[Hkv, C] of each part of a layer."""
    match spec:
        case LaProx(normalise="layer"):
            shares = [_part_scores(spec, part) for part in parts]
            total = sum(float(share.double().sum()) for share in shares)
            return [share / total for share in shares]
        case Rkv(weight=weight, importance=importance, redundancy=redundancy):
            seen, alike = _layer_scores(importance, parts), _layer_scores(redundancy, parts)
            return [weight * s + (1 - weight) * a for s, a in zip(seen, alike, strict=True)]
        case CriticalKV(base=base):
            bases = _layer_scores(base, parts)
            return [_criticalkv(spec, part, b) for part, b in zip(parts, bases, strict=True)]
        case ValueWeighted(base=base, norm=norm, projected=projected, epsilon=epsilon):
            norms = [value_norms(part, norm, projected=projected).mean(dim=1) for part in parts]
            return [(b + epsilon) * n for b, n in zip(_layer_scores(base, parts), norms, strict=True)]
        case Sum(parts=summands):
            scaled = [_scaled(one, _layer_scores(one.score, parts)) for one in summands]
            return [torch.stack(of_part).sum(dim=0) for of_part in zip(*scaled, strict=True)]
        case _:
            return [_part_scores(spec, part) for part in parts]


def _part_scores(spec: Leaf, inputs: ScoreInputs) -> Tensor:
    """[Hkv, C] of a score that looks at each head by itself."""
    match spec:
        case Attention():
            return score_attention.attention(spec, inputs)
        case LastQuery():
            return score_attention.last_query(spec, inputs)
        case Accumulated() | Persistent():
            return running_score(spec, inputs)
        case Noncausal():
            return _noncausal(spec, inputs)
        case ExpectedAttention():
            return score_expected.expected_attention(spec, inputs)
        case KeyNorm():
            return score_rows.key_norm(spec, inputs)
        case KeyDiff():
            return score_rows.key_diff(spec, inputs)
        case LagKV():
            return score_rows.lagkv(spec, inputs)
        case Cur():
            return score_rows.cur(spec, inputs)
        case Leverage():
            return score_rows.leverage(spec, inputs)
        case ValueLeverage():
            return score_expected.value_leverage(spec, inputs)
        case Redundancy():
            return score_rows.redundancy(spec, inputs)
        case Random():
            return score_rows.random(spec, inputs)
        case LaProx():
            return score_attention.laprox(spec, inputs)
        case _:
            assert_never(spec)


# ---- scores of scores --------------------------------------------------------------------------------------


def fixed_rows(spec: CriticalKV, budget_rows: int, inside_rows: int) -> int:
    """Candidates that the first stage chooses: int(fixed * budget), rows of other terms first."""
    return max(0, floor(spec.fixed * (budget_rows + inside_rows)) - inside_rows)


def _criticalkv(spec: CriticalKV, inputs: ScoreInputs, base: Tensor) -> Tensor:
    """The rows of the first stage score +inf (CriticalKV, arXiv:2502.03805, algorithm 1)."""
    if inputs.budget_rows is None:
        raise ValueError("criticalkv depends on the budget: `budget_rows` is missing")
    norms = value_norms(inputs, spec.norm, projected=True).mean(dim=1)
    scores = (base + spec.epsilon) * norms
    count = min(fixed_rows(spec, inputs.budget_rows, inputs.inside_rows), base.shape[1])
    first = base.argsort(dim=-1, descending=True, stable=True)[:, :count]
    return scores.scatter(-1, first, torch.inf)


def _noncausal(spec: Noncausal, inputs: ScoreInputs) -> Tensor:
    """Column sums in chunks (Compactor, arXiv:2507.08143)."""
    scores = running_score(spec, inputs)
    if spec.value_norm:
        scores = scores * value_norms(inputs, "l2", projected=False)[:, 0]
    return score_attention.pool(scores, spec.pool)


def _scaled(summand: Part, scores: Sequence[Tensor]) -> list[Tensor]:
    """Weighted, after a scale over all candidates of the layer."""
    every = torch.cat([of_part.flatten() for of_part in scores]) if scores else torch.empty(0)
    match summand.scale:
        case "none":
            scaled = every
        case "z_score":
            scaled = (every - every.mean()) / every.std().clamp_min(1e-6)
        case "softmax":
            scaled = torch.softmax(every, dim=0)
        case "max":
            scaled = every / every.max() if every.numel() else every
        case _:
            assert_never(summand.scale)
    pieces = (summand.weight * scaled).split([of_part.numel() for of_part in scores])
    return [piece.view_as(of_part) for piece, of_part in zip(pieces, scores, strict=True)]


def _cast(inputs: ScoreInputs, precision: Precision) -> ScoreInputs:
    if precision == "model":
        return inputs
    q_obs = None if inputs.q_obs is None else inputs.q_obs.float()
    return replace(inputs, k=inputs.k.float(), v=inputs.v.float(), q_obs=q_obs)
