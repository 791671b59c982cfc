"""What scores read of one layer, made from the queries, keys and values of a whole prompt.

A runtime gathers the same while chunks of the prompt pass by; here everything is at hand.  Legend: that of
`kernels/score_ops.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvir.kernels.ref.score_expected import QueryMoments
from kvir.kernels.ref.score_needs import needs, running, skips, window
from kvir.kernels.ref.score_running import log_sum_exp, running_of
from kvir.kernels.score_ops import Moments, Rope, RunningScore, ScoreInputs, Sums
from kvir.policy_ir.scores import Score

QUERY_CHUNK = 256  # queries that statistics are given at a time


def prompt_inputs(
    scores: Iterable[Score],
    q: Tensor,  # [n, Hq, D], with rotation
    k: Tensor,  # [n, Hkv, D], with rotation
    v: Tensor,  # [n, Hkv, D]
    *,
    scale: float,
    logit_cap: float = 0.0,
    layer: int = 0,
    w_o: Tensor | None = None,  # [Hq, D, hidden]
    rope: Rope | None = None,
    chunk: int = QUERY_CHUNK,
) -> ScoreInputs:
    """What the scores need, and nothing else; every row is a candidate.

    Raises ValueError if a score needs `w_o` or `rope` and it is not given.
    """
    scores = list(scores)
    wanted = {need for score in scores for need in needs(score)}
    projected = bool(wanted & {"projected_l1", "projected_l2"})
    if projected and w_o is None:
        raise ValueError("the output projection `w_o` is missing")
    if "rope" in wanted and rope is None:
        raise ValueError("the rotation tables `rope` are missing")
    width = max((window(score) for score in scores), default=0)
    sums = list(dict.fromkeys(spec for score in scores for spec in running(score)))
    moments: dict[int, Moments] = {}
    if rope is not None:
        for skip in dict.fromkeys(skip for score in scores for skip in skips(score)):
            moments[skip] = _moments(q, rope, skip, chunk)
    return ScoreInputs(
        k=k,
        v=v,
        candidates=(0, k.shape[0]),
        scale=scale,
        logit_cap=logit_cap,
        layer=layer,
        q_obs=q[-width:] if "q_obs" in wanted else None,
        running=running_sums(sums, q, k, scale, logit_cap=logit_cap, chunk=chunk),
        moments=moments,
        w_o=w_o if projected else None,
        rope=rope if "rope" in wanted else None,
    )


def of_query_heads(inputs: ScoreInputs, mine: slice) -> ScoreInputs:
    """Of what scores read of query heads, the part of some of them; rows are left as they are."""
    return replace(
        inputs,
        q_obs=None if inputs.q_obs is None else inputs.q_obs[:, mine],
        running={spec: Sums(sums.values[mine], sums.seen) for spec, sums in inputs.running.items()},
        moments={n: Moments(m.mean[mine], m.covariance[mine]) for n, m in inputs.moments.items()},
        w_o=None if inputs.w_o is None else inputs.w_o[mine],
        gram=None if inputs.gram is None else inputs.gram[mine],
    )


def running_sums(
    specs: Sequence[RunningScore],
    q: Tensor,
    k: Tensor,
    scale: float,
    *,
    logit_cap: float = 0.0,
    chunk: int = QUERY_CHUNK,
) -> dict[RunningScore, Sums]:
    """The running sums of scores, fed chunk by chunk; one account of the softmax serves them all."""
    n, heads = q.shape[:2]
    made = {
        spec: running_of(spec, heads, scale, tokens=n, logit_cap=logit_cap, device=q.device) for spec in specs
    }
    for start in range(0, n if specs else 0, chunk):
        stop = min(start + chunk, n)
        queries, keys, positions = q[start:stop], k[:stop], torch.arange(start, stop, device=q.device)
        lse = log_sum_exp(queries, keys, positions, scale, logit_cap=logit_cap)
        for sums in made.values():
            sums.update(queries, lse, keys, positions)
    return {spec: sums.sums() for spec, sums in made.items()}


def _moments(q: Tensor, rope: Rope, skip: int, chunk: int) -> Moments:
    found = QueryMoments(q.shape[1], q.shape[2], rope, skip=skip)
    for start in range(0, q.shape[0], chunk):
        stop = min(start + chunk, q.shape[0])
        found.update(q[start:stop], torch.arange(start, stop, device=q.device))
    return found.moments()
