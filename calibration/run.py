"""A whole calibration: samples, replay check, grid of thresholds, residual allocation, held-out loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import msgspec
from torch import Tensor

from kvir import __version__
from kvir.calibration.attend import attend_phases
from kvir.calibration.candidates import FULL, Codebook, codebook
from kvir.calibration.gates import Fit, fit_gates, share_out
from kvir.calibration.harness import CalibrationError, Harness, keep_everything
from kvir.calibration.interface import AttentionCall
from kvir.calibration.memo import Memo
from kvir.calibration.replay import replay
from kvir.calibration.residual import allocate, error_curves
from kvir.calibration.result import FORMAT, Calibration, Inputs, Objective, Phase, Point, kept_share
from kvir.calibration.samples import Sample, pieces, query_positions, retrieval_samples, token_ids
from kvir.calibration.seqcalib import Choices, Matrix, Scores, at_least, matrix, select

Text = tuple[str, str]  # name, content


class Bar(Protocol):
    """Where progress is shown."""

    def phase(self, name: str, steps: int) -> Callable[[], None]: ...


@dataclass(frozen=True)
class Request:
    """What is asked for; see the options of `kvir calibrate seqcalib`."""

    context_tokens: int
    samples: int
    retrieval_samples: int
    retrieval_weight: float
    query_stride: int
    query_share: float
    recent_tokens: tuple[int, ...]
    sink_tokens: tuple[int, ...]
    taus: tuple[float, ...]
    budget: float | None
    budget_context_tokens: int | None
    objective: Objective
    gate_window_tokens: int | None  # None, like the next, for another objective
    gate_steps: int | None
    window_weight: float | None
    phase: Phase
    held_out_samples: int
    seed: int
    dtype: str


@dataclass(frozen=True)
class Data:
    samples: tuple[Sample, ...]
    held_out: tuple[tuple[int, ...], ...]


def gather(harness: Harness, request: Request, text: str, held_out: str | None) -> Data:
    """The samples of the text, in this order: calibration, retrieval, and the held-out ones from its end.

    Raises:
        CalibrationError: too little text.
    """
    context, ids = request.context_tokens, token_ids(harness, text)
    positions = query_positions(context, request.query_share, request.query_stride)
    plain = [Sample(piece, positions) for piece in pieces(harness, ids, context, request.samples)]
    rest = ids[request.samples * context :]
    hidden = retrieval_samples(harness, rest, context, request.retrieval_samples, seed=request.seed)
    rest = rest[request.retrieval_samples * context :] if held_out is None else token_ids(harness, held_out)
    samples = [
        replace(sample, prompt_tokens=sample.positions[0] if request.phase == "decode" else 0)
        for sample in (*plain, *hidden)
    ]
    return Data(tuple(samples), tuple(pieces(harness, rest, context, request.held_out_samples)))


def calibrate(
    harness: Harness, request: Request, text: Text, held_out: Text | None, unfinished: Path | None, bar: Bar
) -> Calibration:
    """Raises CalibrationError when model, text and options do not fit together."""
    if not harness.configurable:
        raise CalibrationError("every layer of this model has its own window; there is nothing to calibrate")
    context = request.context_tokens
    codes = codebook(request.recent_tokens, request.sink_tokens, context)
    if len(codes) < 2:
        raise CalibrationError(f"no candidate is shorter than the context of {context} tokens")
    data = gather(harness, request, text[1], held_out[1] if held_out else None)
    inputs = _inputs(harness, request, text, held_out, len(data.samples[0].positions))
    given = [asdict(request), msgspec.to_builtins(inputs), __version__]
    memo = Memo(unfinished, given)
    memo.get("replay", lambda: replay(harness, data.samples[0].ids))
    layers = harness.configurable
    costs = [[code.rows(inputs.counted_tokens) * layer.head_dim for code in codes] for layer in layers]
    steps = len(layers) * len(data.samples)
    weight = request.retrieval_weight if request.retrieval_samples else 0.0
    fit = _fit(request, codes, inputs.counted_tokens, weight) if request.objective == "gates" else None

    def score(name: str, decide: Callable[[int, Sequence[Sequence[float]]], tuple[int, ...]]) -> Matrix:
        return matrix(harness, data.samples, codes, decide, memo, bar.phase(name, steps))

    named: list[tuple[str, float | None, Matrix]] = []
    for tau in request.taus:
        named.append((f"tau {tau:g}", tau, score(f"SeqCalib, tau {tau:g}", at_least(tau))))
    errors: Scores | None = None
    gates: list[list[float]] | None = None
    if request.objective != "cosine":
        assert request.budget is not None
        step = bar.phase("error curves", steps)
        errors = error_curves(harness, data.samples, codes, memo, step, retrieval_weight=weight)
        full = sum(row[-1] * layer.kv_heads for row, layer in zip(costs, layers, strict=True))
        limit = int(request.budget * full)
        shares = {"residual": allocate(errors, costs, limit)}
        if fit is not None:
            gates = fit_gates(harness, data.samples, fit, memo, bar.phase("gates", fit.steps))
            windows = errors
            if request.window_weight is not None:
                again = bar.phase("error curves, again", steps)  # what was measured is known
                other = request.window_weight
                windows = error_curves(harness, data.samples, codes, memo, again, retrieval_weight=other)
            shares["gates"] = share_out(gates, windows, costs, codes.index(fit.cut), limit)
        for name, taken in shares.items():
            if taken is None:
                raise CalibrationError(f"no candidates fit a budget of {request.budget:g}: give smaller ones")
            deciding: Choices = taken
            found = score(f"scores of {name}", lambda i, _, deciding=deciding: deciding[i])
            named.append((name, None, found))

    chosen = _chosen(
        [(found.minimum_head_score, kept_share(found.choices, costs)) for _, _, found in named], request
    )
    losses = _losses(
        harness, data.held_out, codes, [found.choices for _, _, found in named], request.phase, memo, bar
    )
    points = tuple(
        Point(
            name=name,
            tau=tau,
            choices=found.choices,
            scores=found.scores,
            minimum_head_score=found.minimum_head_score,
            kept_share=kept_share(found.choices, costs),
            error=None if errors is None else _total(errors, found.choices),
            loss=loss,
        )
        for (name, tau, found), loss in zip(named, losses[1:], strict=True)
    )
    return Calibration(
        format=FORMAT,
        version=__version__,
        inputs=inputs,
        candidates=tuple((code.sink_tokens, code.recent_tokens) for code in codes),
        layers=tuple(layer.layer_id for layer in layers),
        errors=errors,
        gates=None if gates is None else tuple(map(tuple, gates)),
        loss_full=losses[0],
        points=points,
        chosen=chosen,
    )


def _chosen(points: Sequence[tuple[float, float]], request: Request) -> int:
    """Which of (minimum-head score, kept share): the allocation, or the budget selector's."""
    if request.objective != "cosine":
        return len(points) - 1
    chosen = select(points, 1.0 if request.budget is None else request.budget)
    if chosen is None:
        least = min(cost for _, cost in points)
        raise CalibrationError(
            f"no threshold keeps at most {request.budget:.1%} of the rows (the least is {least:.1%}): give a "
            "lower --tau, smaller --candidates, a larger --budget, or --objective residual"
        )
    return chosen


def _fit(request: Request, codes: Codebook, counted_tokens: int, retrieval_weight: float) -> Fit:
    """The mean of the gates is the share of heads that have the full history when the others have the cut."""
    assert request.budget is not None
    assert request.gate_window_tokens is not None
    assert request.gate_steps is not None
    found = [code for code in codes if code.recent_tokens == request.gate_window_tokens]
    if not found:
        raise CalibrationError(f"--gate-window {request.gate_window_tokens} is not one of --candidates")
    kept = found[-1].rows(counted_tokens) / counted_tokens
    if kept >= request.budget or request.gate_steps < 1:
        raise CalibrationError(
            f"--gate-window {request.gate_window_tokens} alone keeps {kept:.1%} of the rows: give one that "
            "keeps less than --budget, and --gate-steps of at least 1"
        )
    mean = (request.budget - kept) / (1 - kept)
    return Fit(found[-1], mean, request.gate_steps, retrieval_weight)


def _total(errors: Scores, choices: Choices) -> float:
    rows = zip(errors, choices, strict=True)
    return sum(layer[k][head] for layer, row in rows for head, k in enumerate(row))


def _losses(
    harness: Harness,
    held_out: Sequence[tuple[int, ...]],
    codes: Codebook,
    choices: Sequence[Choices],
    phase: Phase,
    memo: Memo,
    bar: Bar,
) -> list[float | None]:
    """Mean loss over the last half of each held-out sample: of full KV, then of each policy."""
    if not held_out:
        return [None] * (1 + len(choices))
    step = bar.phase("held-out loss", len(held_out) * (1 + len(choices)))

    def one(ids: tuple[int, ...], policy: Choices | None) -> float:
        if policy is None:
            hidden = harness.hidden(ids, keep_everything)
        else:
            prompt_tokens = len(ids) // 2 if phase == "decode" else 0
            hidden = deployed(harness, ids, codes, policy, prompt_tokens)
        return harness.loss(hidden, ids, len(ids) // 2)

    means: list[float | None] = []
    for policy in (None, *choices):
        total = 0.0
        for number, ids in enumerate(held_out):
            total += memo.get(["loss", number, policy], lambda ids=ids, policy=policy: one(ids, policy))
            step()
        means.append(total / len(held_out))
    return means


def deployed(
    harness: Harness, ids: Sequence[int], codes: Codebook, choices: Choices, prompt_tokens: int
) -> Tensor:
    """The last hidden state [T, hidden] under a policy; queries before `prompt_tokens` see everything."""
    kept = {
        layer.layer_id: [codes[k] for k in row]
        for layer, row in zip(harness.configurable, choices, strict=True)
    }

    def attention(call: AttentionCall) -> Tensor:
        now = kept[call.layer_id]
        return attend_phases(call, [FULL] * len(now), now, prompt_tokens)

    return harness.hidden(ids, attention)


def _inputs(harness: Harness, request: Request, text: Text, held_out: Text | None, positions: int) -> Inputs:
    return Inputs(
        arch=harness.facts.arch,
        model=harness.facts.fingerprint,
        weights=harness.weights,
        data=text[0],
        context_tokens=request.context_tokens,
        samples=request.samples,
        retrieval_samples=request.retrieval_samples,
        retrieval_weight=request.retrieval_weight,
        query_positions=positions,
        taus=request.taus,
        objective=request.objective,
        gate_window_tokens=request.gate_window_tokens,
        gate_steps=request.gate_steps,
        window_weight=request.window_weight,
        phase=request.phase,
        budget=request.budget,
        budget_context_tokens=request.budget_context_tokens,
        held_out=held_out[0] if held_out else "what follows in the same text",
        held_out_samples=request.held_out_samples,
        seed=request.seed,
        dtype=request.dtype,
    )
