"""How many rows a selection leaves: bounds before it runs, exact where its budget is a figure.

Exact integer and decimal arithmetic, and the only place that does it: planner, server and reference call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor
from typing import assert_never

from kvir.lowering.spans import Bounds
from kvir.lowering.stages import (
    MassAmount,
    OpenAmount,
    Quota,
    RampAmount,
    RowsAmount,
    Selection,
    ShareAmount,
    TotalAmount,
)
from kvir.policy_ir.budgets import Blend, Protect, Rounding


@dataclass(frozen=True)
class Run:
    """A selection that runs, as one unit sees it."""

    selection: Selection
    n: int  # length of the sequence in tokens
    prompt: int  # of its prompt
    held: Bounds  # rows of the unit
    stays: Bounds  # of them, those that stay whatever their scores are
    again: bool = False  # whether selections before it may have dropped rows that it would keep
    widened: bool = False  # whether rows that stay were fewer then, so that a growing budget does not count
    fewest: int = 0  # if `again`: candidates that any rival had at any of them, at least

    @property
    def candidates(self) -> int:
        """The most rows that scores decide about."""
        return self.held.most - self.stays.least

    def unit_rows(self, quota: Quota) -> Bounds:
        """Rows that one term keeps in one unit."""
        fewest = self.fewest if self.again else None
        rows = unit_rows(quota, self.candidates, self.n, self.prompt, fewest)
        if not self.widened:
            return rows
        before = unit_rows(quota, self.candidates, self.prompt, self.prompt, self.fewest)
        return Bounds(before.least, rows.most)

    def group_rows(self, quota: Quota) -> Bounds:
        """Rows that one term keeps in all units of a group together."""
        fewest = self.fewest if self.again else None
        rows = group_rows(quota, self.candidates, self.n, self.prompt, fewest)
        if not self.widened:
            return rows
        before = group_rows(quota, self.candidates, self.prompt, self.prompt, self.fewest)
        return Bounds(before.least, rows.most)


def first_run(selection: Selection, n: int, prompt: int) -> Run:
    """A selection that runs while every row of the sequence is there."""
    stays = rows_that_stay(selection, n, prompt, n, n)
    return Run(selection, n, prompt, held=Bounds(n, n), stays=Bounds(stays, stays))


def undecided(selection: Selection, n: int, prompt: int) -> tuple[int, int]:
    """Positions [start, stop) that no term by position and no `region` keeps: scores decide about them."""
    sink, recent = selection.sink_tokens, selection.recent_tokens
    match selection.region:
        case "all":
            pass
        case "prompt":
            recent = max(recent, n - prompt)
        case "generated":
            sink = max(sink, prompt)
        case _:
            assert_never(selection.region)
    start = min(n, sink)
    return start, max(start, n - recent)


def rows_that_stay(selection: Selection, n: int, prompt: int, sinks: int, since: int) -> int:
    """Rows that terms by position and `region` keep, whatever the scores are, of a unit that holds the first
    `sinks` rows of n and those from `since` on."""
    end, start = undecided(selection, n, prompt)
    sinks, since = min(n, sinks), min(n, max(sinks, since))
    return min(end, sinks) + max(0, end - since) + max(0, sinks - start) + n - max(start, since)


# ---- one selection -----------------------------------------------------------------------------------------


def kept_rows(run: Run) -> Bounds:
    """Rows that are left in one unit."""
    chosen = [run.unit_rows(quota) for quota in run.selection.quotas]
    # terms may choose the same rows
    low = max((rows.least for rows in chosen), default=0)
    high = sum(rows.most for rows in chosen)
    return Bounds(min(run.held.least, run.stays.least + low), min(run.held.most, run.stays.most + high))


def kept_rows_of_all(run: Run, units: int, groups: Sequence[int]) -> Bounds:
    """Rows that are left in `units` units together.  `groups` is, per quota, how many groups of rivals they
    belong to; of a group that is spread over servers, all its rows may fall on these units."""
    low = high = 0
    for quota, count in zip(run.selection.quotas, groups, strict=True):
        one = run.unit_rows(quota)
        least, most = one.least * units, one.most * units
        if quota.group > 1:
            shared = run.group_rows(quota)
            most = min(most, shared.most * count)
            if count * quota.group == units:  # no group is spread
                least = max(least, shared.least * count)
        low, high = max(low, least), high + most
    return Bounds(
        min(units * run.held.least, units * run.stays.least + low),
        min(units * run.held.most, units * run.stays.most + high),
    )


# ---- one term ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def unit_rows(quota: Quota, candidates: int, n: int, prompt: int, fewest: int | None = None) -> Bounds:
    """Rows that one term keeps in one unit, of so many candidates at most.

    `fewest` is None for a first selection; else candidates of any rival at selections before, at least.
    """
    again = fewest is not None
    if isinstance(quota.amount, MassAmount | OpenAmount):
        cap = candidates if quota.cap is None else quota.cap
        low = quota.floor if quota.floor >= candidates else max(0, quota.floor - _left_over(quota))
        return Bounds(min(candidates, low), min(candidates, cap))
    total = _total(quota, candidates, n, prompt)
    low, high = total, total
    if quota.group > 1:
        # a unit that lost before cannot win what its rivals leave, and one that won may win what they lack
        rivals, tied = quota.group - quota.tied, quota.tied

        def sure(rows: int) -> int:  # of so many rows, those that whole blocks can hold
            return max(0, rows - quota.block + 1)

        low = quota.floor if again else max(quota.floor, (total - rivals * candidates) // tied)
        high = (total if again else total - rivals * min(sure(quota.floor), candidates)) // tied
        high = high if quota.cap is None else min(high, quota.cap)
        mean = Fraction(total, quota.group)
        match quota.safeguard:
            case None:
                pass
            case Blend(share=share):
                equal = _decimal(share) * mean
                # blocks may be left over when units compete, and again when each takes its own
                won = max(0, low - _left_over(quota)) if low < candidates else low
                # where rivals have fewer candidates than the budget has rows, the equal share is of those
                granted = equal if fewest is None else _decimal(share) * min(mean, Fraction(fewest))
                low = _round(won * (1 - _decimal(share)) + granted, "nearest")
                high = _round(high * (1 - _decimal(share)) + equal, "nearest")
            case Protect(share=share):
                # with `counts: kept`, rows of the other terms come first
                safe = max(0, floor(_decimal(share) * (mean + quota.inside)) - quota.inside)
                low, high = (
                    max(low, safe),
                    high if again else min(high, (total - rivals * sure(safe)) // tied),
                )
            case _:
                assert_never(quota.safeguard)
    elif again:
        low, high = _before(quota, total)
    if low < candidates:
        low = max(0, low - _left_over(quota))
    return Bounds(min(low, candidates), min(high, candidates))


def group_rows(quota: Quota, candidates: int, n: int, prompt: int, fewest: int | None = None) -> Bounds:
    """Rows that one term keeps in all units of a group together."""
    again, one = fewest is not None, unit_rows(quota, candidates, n, prompt, fewest)
    if isinstance(quota.amount, MassAmount | OpenAmount):
        return Bounds(one.least * quota.group, one.most * quota.group)
    total = _total(quota, candidates, n, prompt)
    low, high = _before(quota, total) if again else (total, total)
    if low < quota.group * candidates:
        low = max(0, low - _left_over(quota))
    if quota.group > 1 and quota.cap is not None and quota.cap < candidates:
        # a cap holds whole blocks only
        low = min(low, quota.group * max(0, quota.cap - quota.block + 1))
    if isinstance(quota.safeguard, Blend):
        # each unit's share is rounded by itself; what a blend grants a unit that lost before is not there
        slack = (quota.group + 1) // 2
        low = max(0, low - slack - quota.group * (quota.block - 1))
        low = one.least * quota.group if again else low
        high += slack
    return Bounds(low, min(high, quota.group * candidates))


def _left_over(quota: Quota) -> int:
    """The most rows of a budget that stay unused because the next block does not fit."""
    return max(quota.block, quota.step) - 1


def _before(quota: Quota, total: int) -> tuple[int, int]:
    """What a budget may have been at a selection before this one, or with fewer candidates.

    Only a ramp depends on them: a sequence that is too short for it gets its mean.
    """
    if not isinstance(quota.amount, RampAmount):
        return total, total
    flat = quota.group * max(0, quota.amount.mean - quota.inside)
    return min(total, flat), max(total, flat)


def _total(quota: Quota, candidates: int, n: int, prompt: int) -> int:
    """The budget of a group of rivals, or of a unit by itself."""
    group = quota.group
    match quota.amount:
        case RowsAmount(rows=rows):
            total = group * max(0, rows - quota.inside)
        case ShareAmount(share=share, of=of, rounding=rounding):
            rows = _round(_decimal(share) * (n if of == "sequence" else prompt), rounding)
            total = group * max(0, rows - quota.inside)
        case TotalAmount(rows=rows):
            total = max(0, rows - group * quota.inside)
        case RampAmount():
            total = group * _ramp(quota.amount, quota.inside, candidates, n)
        case MassAmount() | OpenAmount():
            total = group * candidates
        case _:
            assert_never(quota.amount)
    if group > 1:
        total = max(total, group * quota.floor)
        total = total if quota.cap is None else min(total, group * quota.cap)
    return min(total, group * candidates)


def _ramp(ramp: RampAmount, inside: int, candidates: int, n: int) -> int:
    """The figure of one layer (arXiv:2406.02069, and its codes); a short sequence has no ramp."""
    base = ramp.mean if ramp.line == "kept" else max(0, ramp.mean - inside)
    above = inside if ramp.line == "kept" else 0  # rows of the line that are not chosen by score
    flat = max(0, base - above)
    if ramp.count == 1 or (ramp.line == "selected" and n < 2 * base):
        return flat
    low = Fraction(base // ramp.ratio) if ramp.arithmetic == "integer" else Fraction(base, ramp.ratio)
    high = 2 * base - low
    if high > candidates:
        low, high = Fraction(2 * base - candidates), Fraction(candidates)
    if not high >= low >= above:
        return flat
    if ramp.arithmetic == "integer":
        return max(0, int(high) - ramp.index * (int(high - low) // (ramp.count - 1)) - above)
    figure = high - ramp.index * (high - low) / (ramp.count - 1)
    return max(0, _round(figure, ramp.rounding) - above)


def _decimal(share: float) -> Fraction:
    """The number that the text says: 0.1 is a tenth."""
    return Fraction(repr(share))


def _round(value: Fraction, rounding: Rounding) -> int:
    match rounding:
        case "down":
            return floor(value)
        case "nearest":
            return floor(value + Fraction(1, 2))
        case "up":
            return ceil(value)
        case _:
            assert_never(rounding)
