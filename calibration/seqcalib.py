"""SeqCalib (HeadWiseKV, arXiv:2609.02029): a window per KV head, layer after layer.

Layers are taken in execution order with all lower layers already under their chosen windows.  For each KV
head and candidate: the mean over samples, query positions and the group's query heads of the cosine between
the attention output with the candidate and with the full history, before any output gate.  The cheapest
candidate with a mean of at least tau is taken, else the full history.  A grid of thresholds gives a matrix
each; the budget selector takes one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvir.calibration.attend import attend_phases
from kvir.calibration.candidates import FULL, Codebook
from kvir.calibration.harness import CalibrationError, Harness
from kvir.calibration.interface import AttentionCall
from kvir.calibration.lockstep import Suspended
from kvir.calibration.memo import Memo
from kvir.calibration.partial import cosine_sums
from kvir.calibration.samples import Sample

Choices = tuple[tuple[int, ...], ...]  # [configurable layer][KV head]: index into the codebook
Scores = tuple[tuple[tuple[float, ...], ...], ...]  # [configurable layer][candidate][KV head]
Progress = Callable[[], None]  # one layer of one sample is done
Decide = Callable[[int, Sequence[Sequence[float]]], tuple[int, ...]]
Pass = Suspended[AttentionCall, Tensor, Tensor]


@dataclass(frozen=True)
class Matrix:
    """A choice for every KV head, and the scores that each layer had under the choices below it."""

    choices: Choices
    scores: Scores

    @property
    def minimum_head_score(self) -> float:
        """The smallest score of a chosen candidate over all heads."""
        return min(
            layer[index][head]
            for layer, row in zip(self.scores, self.choices, strict=True)
            for head, index in enumerate(row)
        )


def choose(scores: Sequence[Sequence[float]], tau: float) -> tuple[int, ...]:
    """Per KV head the first candidate with a score of at least tau, else the last.  `scores` is [K][Hkv]."""
    last = len(scores) - 1
    heads = range(len(scores[0]))
    return tuple(next((k for k in range(last) if scores[k][head] >= tau), last) for head in heads)


def at_least(tau: float) -> Decide:
    """The rule of the paper."""
    return lambda _, scores: choose(scores, tau)


def matrix(
    harness: Harness,
    samples: Sequence[Sample],
    codes: Codebook,
    decide: Decide,
    memo: Memo,
    progress: Progress,
) -> Matrix:
    """One pass over all layers.  `decide` is given the place of a layer among the configurable ones, and its
    scores, and says what each KV head gets.

    Raises:
        CalibrationError: a score is not a finite number.
    """
    choices: list[tuple[int, ...]] = []
    scores: list[Any] = []
    for layer in harness.configurable:  # what an earlier pass found needs no forward pass
        name = ["scores", layer.layer_id, choices]
        if name not in memo:
            break
        scores.append(memo.get(name, list))
        choices.append(decide(len(choices), scores[-1]))
        for _ in samples:
            progress()
    if len(choices) < len(harness.configurable):
        _go_on(harness, samples, codes, decide, memo, progress, choices, scores)
    frozen = tuple(tuple(tuple(row) for row in layer) for layer in scores)
    return Matrix(tuple(choices), frozen)


def _go_on(
    harness: Harness,
    samples: Sequence[Sample],
    codes: Codebook,
    decide: Decide,
    memo: Memo,
    progress: Progress,
    choices: list[tuple[int, ...]],
    scores: list[Any],
) -> None:
    """Run the samples through the layers whose choices are known, and choose for the rest."""

    def run(sample: Sample) -> Pass:
        return Suspended(lambda ask: harness.hidden(sample.ids, ask))

    passes = [run(sample) for sample in samples]
    answers: list[Tensor | None] = [None] * len(samples)
    try:
        for index, layer in enumerate(harness.configurable):
            calls: list[AttentionCall] = []
            for number, one in enumerate(passes):
                call = one.advance(answers[number])
                answers[number] = None
                if call is None or call.layer_id != layer.layer_id:
                    raise CalibrationError(f"the model does not run layer {layer.layer_id} where it should")
                calls.append(call)
            if index == len(choices):
                found = memo.get(
                    ["scores", layer.layer_id, choices],
                    lambda calls=calls: layer_scores(calls, samples, codes, progress),
                )
                scores.append(found)
                choices.append(decide(index, found))
            kept = [codes[k] for k in choices[index]]
            if index + 1 < len(harness.configurable):  # what follows the last choice decides nothing
                full = [FULL] * layer.kv_heads
                answers = [
                    attend_phases(call, full, kept, sample.prompt_tokens)
                    for call, sample in zip(calls, samples, strict=True)
                ]
    finally:
        for one in passes:
            one.stop()


@torch.no_grad()
def layer_scores(
    calls: Sequence[AttentionCall], samples: Sequence[Sample], codes: Codebook, progress: Progress
) -> list[list[float]]:
    """Mean cosine [K][Hkv]; with retrieval samples the smaller of the means over either kind."""
    means: list[Tensor] = []
    for kind in dict.fromkeys(sample.kind for sample in samples):
        total = torch.zeros(len(codes), calls[0].key.shape[0], dtype=torch.float64)
        count = 0
        for call, sample in zip(calls, samples, strict=True):
            if sample.kind != kind:
                continue
            positions = torch.tensor(sample.positions, device=call.query.device)
            total += cosine_sums(call, positions, codes)
            count += len(sample.positions) * call.group
            progress()
        means.append(total / count)
    score = torch.stack(means).amin(0)
    if not score.isfinite().all():
        raise CalibrationError(f"layer {calls[0].layer_id} gives numbers that are not finite")
    return score.tolist()


def select(points: Sequence[tuple[float, float]], limit: float) -> int | None:
    """The budget selector.  `points` are (minimum-head score, cost); of those that cost at most `limit`, the
    highest score, then the lowest cost, then the lowest index.  None if nothing is feasible."""
    feasible = [i for i, (_, cost) in enumerate(points) if cost <= limit]
    return min(feasible, key=lambda i: (-points[i][0], points[i][1], i), default=None)
