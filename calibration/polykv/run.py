"""A whole calibration: samples, signals layer by layer, budgets, held-out loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from kvir import __version__
from kvir.calibration.harness import CalibrationError, Harness
from kvir.calibration.memo import Memo
from kvir.calibration.parts import find_parts
from kvir.calibration.polykv.budgets import share_out
from kvir.calibration.polykv.deploy import losses
from kvir.calibration.polykv.kept import Model
from kvir.calibration.polykv.methods import Method, find
from kvir.calibration.polykv.policy import plan_rules, policy, single
from kvir.calibration.polykv.result import FORMAT, Inputs, MethodRule, PolyCalibration
from kvir.calibration.polykv.rope import find_ropes
from kvir.calibration.polykv.signals import Grain, Setting, signals
from kvir.calibration.replay import replay
from kvir.calibration.run import Bar, Text
from kvir.calibration.samples import Sample, asked_in_prompt, pieces, retrieval_samples, token_ids
from kvir.kernels.ref.score_needs import needs
from kvir.policy_ir import Policy, print_policy

FUTURE = 512  # positions beyond a prompt that scores look at, `future` of expected attention


@dataclass(frozen=True)
class Request:
    """What is asked for; see the options of `kvir calibrate polykv`."""

    grain: Grain
    budget: float
    context_tokens: int
    continuation_tokens: int
    samples: int
    retrieval_samples: int
    retrieval_weight: float
    query_stride: int
    methods: tuple[str, ...]
    sink_tokens: int
    recent_tokens: int
    shares: tuple[float, ...]
    minimum_rows: int | None
    held_out_samples: int
    seed: int
    dtype: str


def calibrate(
    harness: Harness,
    request: Request,
    text: Text,
    held_out: Text | None,
    name: str,
    unfinished: Path | None,
    bar: Bar,
) -> tuple[PolyCalibration, Policy]:
    """The grid, and the plan as a policy.

    Raises:
        CalibrationError: model, text and options do not fit together.
        PolicyError, OSError: a method's file is no policy.
    """
    if not harness.configurable:
        raise CalibrationError("every layer of this model has its own window; there is nothing to calibrate")
    context = request.context_tokens
    methods = find(
        request.methods,
        sink_tokens=request.sink_tokens,
        recent_tokens=request.recent_tokens,
        per_head=request.grain == "head",
    )
    minimum = _minimum(request, methods)
    total = context + request.continuation_tokens
    model = understand(harness, total + _future(methods))
    _check_scores(harness, model, methods)
    samples, checks = gather(harness, request, text[1], held_out[1] if held_out else None)
    shares = _shares(request, minimum)
    setting = Setting(
        methods, shares, shares.index(request.budget), context, request.grain, request.retrieval_weight
    )
    inputs = _inputs(harness, request, text, held_out, minimum)
    rules = [
        print_policy(single(m, harness.facts, round(request.budget * context), context)) for m in methods
    ]
    memo = Memo(unfinished, [asdict(request), msgspec.to_builtins(inputs), rules, __version__])
    memo.get("replay", lambda: replay(harness, samples[0].ids))
    steps = len(harness.configurable) * len(samples)
    measured, routed = signals(harness, model, setting, samples, memo, bar.phase("signals", steps))
    choices = share_out(harness, setting, measured, routed, request.budget)
    found = PolyCalibration(
        kind="polykv",
        format=FORMAT,
        version=__version__,
        inputs=inputs,
        methods=tuple(MethodRule(m.name, rule) for m, rule in zip(methods, rules, strict=True)),
        shares=shares,
        layers=tuple(layer.layer_id for layer in harness.configurable),
        signals=tuple(measured),
        routed=tuple(tuple(row) for row in routed),
        choices=choices,
        full=None,
        singles=(),
        plan=None,
    )
    per_head = request.grain == "head"
    plan = policy(
        harness.facts,
        plan_rules(methods, found.layers, choices, context, per_head=per_head),
        name,
        found,
    )
    if not checks:
        return found, plan
    everywhere = {m.name: single(m, harness.facts, round(request.budget * context), context) for m in methods}
    step = bar.phase("held-out loss", len(checks))
    points = losses(harness, model, checks, context, {**everywhere, "this plan": plan}, memo, step)
    full, *singles, planned = points
    return msgspec.structs.replace(found, full=full, singles=tuple(singles), plan=planned), plan


def understand(harness: Harness, positions: int) -> Model:
    """What scores read of a model beside queries, keys and values."""
    index = {layer.layer_id: i for i, layer in enumerate(harness.facts.layers)}
    return Model(find_parts(harness), find_ropes(harness, positions), index)


def gather(
    harness: Harness, request: Request, text: str, held_out: str | None
) -> tuple[list[Sample], list[tuple[int, ...]]]:
    """Calibration samples (texts, then retrieval: asked after the prompt and at its end, in turn), and the
    held-out pieces, all of different text.

    Raises:
        CalibrationError: too little text.
    """
    context, total = request.context_tokens, request.context_tokens + request.continuation_tokens
    ids = token_ids(harness, text)
    positions = tuple(range(context, total, request.query_stride))
    plain = [
        Sample(piece, positions, prompt_tokens=context)
        for piece in pieces(harness, ids, total, request.samples)
    ]
    rest = ids[request.samples * total :]
    hidden = retrieval_samples(harness, rest, total, request.retrieval_samples, seed=request.seed)
    turned = [asked_in_prompt(sample) if i % 2 else sample for i, sample in enumerate(hidden)]
    rest = rest[request.retrieval_samples * total :] if held_out is None else token_ids(harness, held_out)
    return [*plain, *turned], pieces(harness, rest, total, request.held_out_samples)


def _shares(request: Request, minimum: int) -> tuple[float, ...]:
    """The budgets that are measured, ascending; the last is all rows."""
    context = request.context_tokens
    given = {*request.shares, request.budget, minimum / context}
    return (*sorted(share for share in given if minimum <= share * context < context), 1.0)


def _minimum(request: Request, methods: Sequence[Method]) -> int:
    """Rows of the smallest budget.

    Raises:
        CalibrationError: budgets, context and methods do not fit together.
    """
    least = max((m.inside_rows for m in methods if m.term is not None), default=request.sink_tokens + 1)
    minimum = least if request.minimum_rows is None else request.minimum_rows
    if minimum < least:
        raise CalibrationError(f"--minimum {minimum} is less than the {least} sinks and recent rows")
    if not minimum < request.budget * request.context_tokens < request.context_tokens:
        raise CalibrationError(
            f"--budget {request.budget:g} of {request.context_tokens} tokens is not between the minimum of "
            f"{minimum} rows and all"
        )
    return minimum


def _future(methods: Sequence[Method]) -> int:
    """Positions beyond the rows that scores look at."""
    futures = [getattr(m.term.by, "future", 0) for m in methods if m.term is not None]
    return max([*futures, FUTURE])


def _check_scores(harness: Harness, model: Model, methods: Sequence[Method]) -> None:
    turned = [m.name for m in methods if m.term is not None and "rope" in needs(m.term.by)]
    missing = [layer.layer_id for layer in harness.configurable if layer.layer_id not in model.ropes]
    if turned and missing:
        raise CalibrationError(
            f"the rotation of layers {missing} was not understood, and {', '.join(turned)} must undo it: "
            "name other --methods"
        )


def _inputs(harness: Harness, request: Request, text: Text, held_out: Text | None, minimum: int) -> Inputs:
    return Inputs(
        arch=harness.facts.arch,
        model=harness.facts.fingerprint,
        weights=harness.weights,
        data=text[0],
        grain=request.grain,
        budget=request.budget,
        minimum_rows=minimum,
        context_tokens=request.context_tokens,
        continuation_tokens=request.continuation_tokens,
        samples=request.samples,
        retrieval_samples=request.retrieval_samples,
        retrieval_weight=request.retrieval_weight,
        query_stride=request.query_stride,
        held_out=held_out[0] if held_out else "what follows in the same text",
        held_out_samples=request.held_out_samples,
        seed=request.seed,
        dtype=request.dtype,
    )
