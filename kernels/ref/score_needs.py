"""What a score must be given, and how many queries it looks at: known before a sequence starts."""

from __future__ import annotations

from collections.abc import Iterator

from kvir.kernels.ref.score_expected import VALUE_LEVERAGE_SKIP
from kvir.kernels.score_ops import Need, RunningScore
from kvir.policy_ir.budgets import Preference
from kvir.policy_ir.scores import (
    Accumulated,
    Attention,
    CriticalKV,
    ExpectedAttention,
    KeyDiff,
    LaProx,
    LastQuery,
    Leverage,
    Noncausal,
    Persistent,
    Rkv,
    Score,
    Sum,
    ValueLeverage,
    ValueWeighted,
)
from kvir.policy_ir.terms import Term, TopK, TopP


def term_scores(term: Term) -> tuple[Score, ...]:
    """The scores that a term reads; a `preference` reads the queries of its window like `attention`."""
    match term:
        case TopK(by=by, budget=Preference(window=width)):
            return (by, Attention(window=width))
        case TopK(by=by):
            return (by,)
        case TopP(by=by, of=of):
            return (by,) if of is None else (by, of)
        case _:
            return ()


def parts(spec: Score) -> Iterator[Score]:
    """A score and every score inside it."""
    yield spec
    match spec:
        case Rkv(importance=one, redundancy=other):
            yield from parts(one)
            yield other
        case CriticalKV(base=base) | ValueWeighted(base=base):
            yield from parts(base)
        case Sum(parts=summands):
            for part in summands:
                yield from parts(part.score)
        case _:
            pass


def needs(spec: Score) -> frozenset[Need]:
    """The fields of `ScoreInputs` that must be given, beside k, v, candidates and scale."""
    return frozenset(need for part in parts(spec) for need in _own_needs(part))


def observed_queries(spec: Score) -> int | None:
    """How many of the last queries must be computed, not taken from a prefix cache; None: every query."""
    counts = [_own_queries(part) for part in parts(spec)]
    if None in counts:
        return None
    return max(count for count in counts if count is not None)


def window(spec: Score) -> int:
    """How many of the last queries `q_obs` must hold; 0 if none are read."""
    widths = {Attention: lambda s: s.window, LaProx: lambda s: s.window, LastQuery: lambda _: 1}
    return max((widths[type(p)](p) for p in parts(spec) if type(p) in widths), default=0)


def running(spec: Score) -> tuple[RunningScore, ...]:
    """The scores inside it that are sums over queries, each once: the keys of `ScoreInputs.running`."""
    found = [p for p in parts(spec) if isinstance(p, Accumulated | Persistent | Noncausal)]
    return tuple(dict.fromkeys(found))


def skips(spec: Score) -> tuple[int, ...]:
    """The keys of `ScoreInputs.moments` that it reads."""
    found = []
    for part in parts(spec):
        if isinstance(part, ExpectedAttention):
            found.append(part.skip)
        elif isinstance(part, ValueLeverage):
            found.append(VALUE_LEVERAGE_SKIP)
    return tuple(dict.fromkeys(found))


def _own_needs(spec: Score) -> tuple[Need, ...]:
    match spec:
        case Attention() | LastQuery():
            return ("q_obs",)
        case Accumulated() | Persistent() | Noncausal():
            return ("running",)
        case ExpectedAttention() | ValueLeverage():
            return ("query_moments", "rope")
        case KeyDiff(rotated=False) | Leverage():
            return ("rope",)
        case LaProx():
            return ("q_obs", "projected_l2")
        case CriticalKV(norm=norm):
            return ("budget_rows", "projected_l1" if norm == "l1" else "projected_l2")
        case ValueWeighted(projected=True, norm=norm):
            return ("projected_l1" if norm == "l1" else "projected_l2",)
        case _:
            return ()


def _own_queries(spec: Score) -> int | None:
    match spec:
        case Attention(window=width) | LaProx(window=width):
            return width
        case LastQuery():
            return 1
        case Persistent(history=history):
            return history
        case Accumulated() | Noncausal() | ExpectedAttention() | ValueLeverage():
            return None
        case _:
            return 0
