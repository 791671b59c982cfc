"""The gates objective: which KV heads need the full history, decided for all heads together.

Every head's output is a mixture, `a * full + (1 - a) * cut`, with a gate `a` in [0, 1] (the idea is
DuoAttention's, arXiv:2410.10819).  The gates are fitted so that the model's predictions stay those of full KV
(Kullback-Leibler divergence at the query positions), while their mean is held at what the budget allows.
Curves per head cannot see that one head does another's work; the gates can, for all are changed at once.

The budget falls from a model that is nearly whole to the one asked for, and the gates sharpen on the way: at
the end most of them are 0 or 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from kvir.calibration.attend import attend, prompt_queries
from kvir.calibration.candidates import FULL, Candidate
from kvir.calibration.harness import Harness, keep_everything
from kvir.calibration.interface import AttentionCall
from kvir.calibration.memo import Memo
from kvir.calibration.residual import allocate
from kvir.calibration.samples import Sample
from kvir.calibration.seqcalib import Choices, Progress, Scores

FIRST_MEAN = 0.8  # of the gates, when the fit begins
FALLING_SHARE = 0.6  # of the steps, until the mean is what the budget allows
WARM, COLD = 1.0, 0.25  # temperature of the gates, at the first and at the last step
RATE = 0.15  # of Adam, in units of a gate's logit
MOMENTS = 0.9, 0.95


@dataclass(frozen=True)
class Fit:
    """What a fit is asked for."""

    cut: Candidate  # what a head with a closed gate keeps
    mean: float  # of the gates, weighted by the size of their rows
    steps: int
    retrieval_weight: float


def fit_gates(
    harness: Harness, samples: Sequence[Sample], fit: Fit, memo: Memo, progress: Progress
) -> list[list[float]]:
    """The logits of the gates [layer][Hkv]; a greater one needs the full history more."""
    layers = harness.configurable
    sizes = np.array([float(layer.head_dim) for layer in layers for _ in range(layer.kv_heads)])
    sizes /= sizes.sum()
    logits = torch.zeros(len(sizes), dtype=torch.float64)
    adam = torch.optim.Adam([logits], lr=RATE, betas=MOMENTS, eps=1e-12)
    full = functools.cache(functools.partial(full_predictions, harness))
    weight = {"text": 1.0, "retrieval": fit.retrieval_weight}
    turns = in_turn(samples)
    for step in range(fit.steps):
        mean, temperature = schedule(fit, step)
        gates = gates_of(logits.numpy(), sizes, mean, temperature)

        def one(step: int = step, gates: np.ndarray = gates) -> list[float]:
            sample = turns[step % len(turns)]
            gradient = _gradient(harness, sample, fit.cut, gates, full(sample))
            return (weight[sample.kind] * gradient).tolist()

        found = np.array(memo.get(["gate", step], one))
        logits.grad = torch.from_numpy(_of_logits(found, gates, sizes, temperature))
        adam.step()
        progress()
    rows = iter(logits.tolist())
    return [[next(rows) for _ in range(layer.kv_heads)] for layer in layers]


def in_turn(samples: Sequence[Sample]) -> list[Sample]:
    """The samples so that kinds take turns."""
    kinds = [[s for s in samples if s.kind == kind] for kind in dict.fromkeys(s.kind for s in samples)]
    rounds = math.lcm(*map(len, kinds))
    return [kind[i % len(kind)] for i in range(rounds) for kind in kinds]


def share_out(
    logits: Sequence[Sequence[float]],
    errors: Scores,
    costs: Sequence[Sequence[int]],
    cut: int,
    limit: int,
) -> Choices | None:
    """Full histories for the heads with the greatest logits, as many as fit in `limit` when the others have
    the candidate number `cut`; shorter candidates for those by their error curves.  None if nothing fits.

    `costs` is [layer][K], full last; `errors` [layer][K][Hkv].
    """
    heads = [(i, h) for i, row in enumerate(logits) for h in range(len(row))]
    heads.sort(key=lambda head: (-logits[head[0]][head[1]], head))
    left = limit - sum(costs[i][cut] for i, _ in heads)
    full: set[tuple[int, int]] = set()
    for i, h in heads:
        left -= costs[i][-1] - costs[i][cut]
        if left < 0:
            break
        full.add((i, h))
    curves = tuple(
        tuple(
            tuple(
                error if ((i, h) in full) == (k == len(layer) - 1) else math.inf
                for h, error in enumerate(row)
            )
            for k, row in enumerate(layer)
        )
        for i, layer in enumerate(errors)
    )
    return allocate(curves, costs, limit)


def schedule(fit: Fit, step: int) -> tuple[float, float]:
    """Mean and temperature of the gates at a step."""
    part = step / max(1, fit.steps - 1)
    fallen = min(1.0, part / FALLING_SHARE)
    first = max(FIRST_MEAN, fit.mean)
    return first + (fit.mean - first) * fallen, WARM * (COLD / WARM) ** part


def gates_of(logits: np.ndarray, sizes: np.ndarray, mean: float, temperature: float) -> np.ndarray:
    """sigmoid((logits + shift) / temperature) with the shift at which the weighted mean is as given."""
    low, high = -40.0 - logits.max(), 40.0 - logits.min()
    for _ in range(80):
        shift = (low + high) / 2
        gates = _sigmoid((logits + shift) / temperature)
        low, high = (shift, high) if sizes @ gates < mean else (low, shift)
    return _sigmoid((logits + (low + high) / 2) / temperature)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(x, -60, 60)))


def _of_logits(gradient: np.ndarray, gates: np.ndarray, sizes: np.ndarray, temperature: float) -> np.ndarray:
    """The gradient of the logits from that of the gates; the shift moves with them and keeps the mean."""
    slope = gates * (1 - gates) / temperature
    held = (slope @ gradient) / max(slope @ sizes, 1e-12)
    return slope * (gradient - held * sizes)


def full_predictions(harness: Harness, sample: Sample) -> Tensor:
    """What full KV predicts at the query positions of a sample: log-probabilities [Q, vocabulary]."""
    return _predicted(harness, harness.hidden(sample.ids, keep_everything), sample)


def _predicted(harness: Harness, hidden: Tensor, sample: Sample) -> Tensor:
    return log_softmax(harness.logits(hidden, sample.positions), -1)


def _gradient(
    harness: Harness, sample: Sample, cut: Candidate, gates: np.ndarray, full: Tensor
) -> np.ndarray:
    """Of the mean divergence from full KV, with respect to the gates, flat."""
    given: dict[int, Tensor] = {}
    rows = iter(gates.tolist())
    for layer in harness.configurable:
        values = [next(rows) for _ in range(layer.kv_heads)]
        given[layer.layer_id] = torch.tensor(values, device=harness.device, requires_grad=True)

    def attention(call: AttentionCall) -> Tensor:
        return mixed(call, given[call.layer_id], cut, sample.prompt_tokens)

    predicted = _predicted(harness, harness.hidden(sample.ids, attention), sample)
    kl_div(predicted, full, log_target=True, reduction="sum").div(len(sample.positions)).backward()
    found: list[float] = []
    for gate in given.values():
        assert gate.grad is not None
        found += gate.grad.tolist()
    return np.array(found)


def mixed(call: AttentionCall, gates: Tensor, cut: Candidate, prompt_tokens: int) -> Tensor:
    """Outputs [T, Hq, Dv]: `gates` [Hkv] between the full history, at 1, and `cut`, at 0; queries before
    `prompt_tokens` see everything."""
    heads = call.key.shape[0]
    full = attend(call, [FULL] * heads)
    start = prompt_queries(call, prompt_tokens)
    if start == call.query.shape[1]:
        return full
    late = replace(call, query=call.query[:, start:])
    gate = gates.repeat_interleave(call.group)[None, :, None].to(full.dtype)
    short = attend(late, [cut] * heads)
    made: Any = short + gate * (full[start:] - short)
    return torch.cat([full[:start], made])
