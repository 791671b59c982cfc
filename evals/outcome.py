"""Scores of an evaluation: means with bootstrap intervals, by task and length, and of the evicted items."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

RESAMPLES = 2000
LEVEL = 0.95


class Scored(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One item and what was answered.  With a baseline, that one's answer too."""

    task: str
    tokens: int
    number: int
    prompt_tokens: int
    evicted_share: float | None  # of the prompt's rows; None: not known
    references: tuple[str, ...]
    answer: str
    score: float
    baseline_answer: str | None = None
    baseline_score: float | None = None


class Mean(msgspec.Struct, frozen=True, kw_only=True):
    """A mean over items and the interval that holds it in 95 of 100 resamples."""

    items: int
    mean: float
    low: float
    high: float


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table.  Differences and ratios are paired: of the same items."""

    task: str
    tokens: str
    score: Mean
    evicted_share: float | None
    baseline: Mean | None
    difference: Mean | None
    ratio: Mean | None  # of the means; None where the baseline scores nothing


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A finished evaluation."""

    format: int
    version: str
    settings: dict[str, Any]
    rows: tuple[Row, ...]
    evicted: Row | None  # items of which rows were evicted; None: nothing known or none
    items: tuple[Scored, ...]


def bootstrap(items: Sequence[Scored], value: Callable[[Sequence[Scored]], float], seed: int = 0) -> Mean:
    """Percentile bootstrap over items; deterministic."""
    rng = random.Random(seed)
    drawn = sorted(value(rng.choices(items, k=len(items))) for _ in range(RESAMPLES))
    edge = round((1 - LEVEL) / 2 * RESAMPLES)
    return Mean(items=len(items), mean=value(items), low=drawn[edge], high=drawn[-1 - edge])


def summarise(items: Sequence[Scored]) -> tuple[tuple[Row, ...], Row | None]:
    """Rows by task and length and one over all; and one over the items of which rows were evicted."""
    cells: dict[tuple[str, int], list[Scored]] = {}
    for item in items:
        cells.setdefault((item.task, item.tokens), []).append(item)
    rows = [_row(task, str(tokens), found) for (task, tokens), found in cells.items()]
    for tokens in dict.fromkeys(item.tokens for item in items):
        rows.append(_row("all", str(tokens), [item for item in items if item.tokens == tokens]))
    rows.append(_row("all", "all", items))
    cut = [item for item in items if item.evicted_share]
    return tuple(rows), _row("evicted", "all", cut) if cut else None


def _row(task: str, tokens: str, items: Sequence[Scored]) -> Row:
    known = [item.evicted_share for item in items if item.evicted_share is not None]
    baseline = difference = ratio = None
    if all(item.baseline_score is not None for item in items):
        baseline = bootstrap(items, _baseline)
        difference = bootstrap(items, lambda some: _score(some) - _baseline(some))
        if baseline.mean > 0:
            ratio = bootstrap(items, lambda some: _score(some) / max(_baseline(some), 1e-9))
    return Row(
        task=task,
        tokens=tokens,
        score=bootstrap(items, _score),
        evicted_share=sum(known) / len(known) if known else None,
        baseline=baseline,
        difference=difference,
        ratio=ratio,
    )


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _score(items: Sequence[Scored]) -> float:
    return _mean(item.score for item in items)


def _baseline(items: Sequence[Scored]) -> float:
    return _mean(item.baseline_score or 0.0 for item in items)
