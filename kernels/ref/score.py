"""Reference of `ScoreRows`: one function per score of the language."""

from __future__ import annotations

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


def score(spec: Score, inputs: ScoreInputs, precision: Precision = "float32") -> Tensor:
    """float32 [Hkv, n]; -inf for rows that are no candidates.

    `precision: model` takes logits, and weights after their softmax, in the type of k; the softmax itself and
    all scores that read no queries are float32 always.  Raises ValueError if something is missing.
    """
    start, stop = inputs.candidates
    n = inputs.k.shape[0]
    if not 0 <= start <= stop <= n:
        raise ValueError(f"the candidates {start}..{stop} are no run of the {n} rows")
    out = torch.full((inputs.k.shape[1], n), -torch.inf)
    if start < stop:
        out[:, start:stop] = candidate_scores(spec, _cast(inputs, precision)).float()
    return out


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


def candidate_scores(spec: Score, inputs: ScoreInputs) -> Tensor:
    """[Hkv, C]."""
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
        case Rkv(weight=weight, importance=importance, redundancy=redundancy):
            alike = score_rows.redundancy(redundancy, inputs)
            return weight * candidate_scores(importance, inputs) + (1 - weight) * alike
        case LaProx():
            return score_attention.laprox(spec, inputs)
        case CriticalKV():
            return _criticalkv(spec, inputs)
        case ValueWeighted(base=base, norm=norm, projected=projected, epsilon=epsilon):
            norms = value_norms(inputs, norm, projected=projected).mean(dim=1)
            return (candidate_scores(base, inputs) + epsilon) * norms
        case Sum(parts=parts):
            summands = [part.weight * _scaled(part, candidate_scores(part.score, inputs)) for part in parts]
            return torch.stack(summands).sum(dim=0)
        case _:
            assert_never(spec)


# ---- scores of scores --------------------------------------------------------------------------------------


def fixed_rows(spec: CriticalKV, budget_rows: int, inside_rows: int) -> int:
    """Candidates that the first stage chooses: int(fixed * budget), rows of other terms first."""
    return max(0, floor(spec.fixed * (budget_rows + inside_rows)) - inside_rows)


def _criticalkv(spec: CriticalKV, inputs: ScoreInputs) -> Tensor:
    """The rows of the first stage score +inf (CriticalKV, arXiv:2502.03805, algorithm 1)."""
    if inputs.budget_rows is None:
        raise ValueError("criticalkv depends on the budget: `budget_rows` is missing")
    base = candidate_scores(spec.base, inputs)
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


def _scaled(part: Part, scores: Tensor) -> Tensor:
    """Over all candidates of the layer."""
    match part.scale:
        case "none":
            return scores
        case "z_score":
            return (scores - scores.mean()) / scores.std().clamp_min(1e-6)
        case "softmax":
            return torch.softmax(scores.flatten(), dim=0).view_as(scores)
        case "max":
            return scores / scores.max()
        case _:
            assert_never(part.scale)


def _cast(inputs: ScoreInputs, precision: Precision) -> ScoreInputs:
    if precision == "model":
        return inputs
    q_obs = None if inputs.q_obs is None else inputs.q_obs.float()
    return replace(inputs, k=inputs.k.float(), v=inputs.v.float(), q_obs=q_obs)
