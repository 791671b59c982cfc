"""What scores read of one layer in transformers, computed in one go from all of its queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvir.kernels.ref.score_expected import QueryMoments
from kvir.kernels.ref.score_needs import needs, running, skips, term_scores, window
from kvir.kernels.ref.score_running import ChunkSums, ColumnSums, log_sum_exp
from kvir.kernels.score_ops import Moments, Rope, Running, RunningScore, ScoreInputs, Sums
from kvir.policy_ir.nodes import Rule
from kvir.policy_ir.scores import Noncausal, Persistent


def inputs_of(
    rule: Rule,
    module: Any,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Mapping[str, Any],
    rope: Rope | None,
) -> ScoreInputs:
    """Of all heads: every query so far, and the rows that are held."""
    scale, cap = options.get("scaling") or q.shape[-1] ** -0.5, options.get("softcap") or 0.0
    scores = [score for term in rule.keep for score in term_scores(term)]
    asked = {need for score in scores for need in needs(score)}
    observed = max(map(window, scores), default=0)
    moments: dict[int, QueryMoments] = {}
    for skip in {skip for score in scores for skip in skips(score)}:
        assert rope is not None
        moments[skip] = QueryMoments(q.shape[1], q.shape[2], rope, skip=skip)
        moments[skip].update(q, torch.arange(q.shape[0]))
    w_o = None
    if asked & {"projected_l1", "projected_l2"}:
        w_o = module.o_proj.weight.T.float().reshape(q.shape[1], q.shape[2], -1)
    return ScoreInputs(
        k=k,
        v=v,
        candidates=(0, 0),
        scale=scale,
        logit_cap=cap,
        layer=layer,
        q_obs=q[max(0, q.shape[0] - observed) :],
        running={spec: _sums(spec, q, k, scale, cap) for score in scores for spec in running(score)},
        moments={skip: m.moments() for skip, m in moments.items()},
        w_o=w_o,
        rope=rope,
    )


def of_head(inputs: ScoreInputs, head: int, kv_heads: int, rows: Tensor, tokens: int) -> ScoreInputs:
    """Inputs of one head alone, which holds the rows at these positions, at `tokens` tokens."""
    assert inputs.q_obs is not None
    query_heads, count = inputs.q_obs.shape[1], inputs.q_obs.shape[0]
    group = query_heads // kv_heads
    mine = slice(head * group, (head + 1) * group)
    return replace(
        inputs,
        k=inputs.k[:, head : head + 1],
        v=inputs.v[:, head : head + 1],
        first_head=head,
        positions=rows,
        q_obs=inputs.q_obs[:, mine],
        q_positions=torch.arange(tokens - count, tokens),
        running={spec: Sums(sums.values[mine], sums.seen) for spec, sums in inputs.running.items()},
        moments={n: Moments(m.mean[mine], m.covariance[mine]) for n, m in inputs.moments.items()},
        w_o=None if inputs.w_o is None else inputs.w_o[mine],
    )


def _sums(spec: RunningScore, q: Tensor, k: Tensor, scale: float, cap: float) -> Sums:
    positions = torch.arange(q.shape[0])
    sums: Running
    if isinstance(spec, Noncausal):
        sums = ChunkSums(spec, q.shape[1], scale, logit_cap=cap)
    else:
        history = spec.history if isinstance(spec, Persistent) else None
        first = 0 if history is None else max(0, q.shape[0] - history)
        sums = ColumnSums(spec, q.shape[1], scale, logit_cap=cap, first_query=first)
    sums.update(q, log_sum_exp(q, k, positions, scale, logit_cap=cap), k, positions)
    return sums.sums()
