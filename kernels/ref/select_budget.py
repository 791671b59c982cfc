"""How many rows a `top_k` may choose: a plain account of `policy_ir/budgets.py`, in exact decimal arithmetic.

n is the length of the sequence in tokens, `prompt` that of its prompt, `inside` the rows of terms by position
that the budget counts (0 unless `counts: kept`), `candidates` the rows of a unit that compete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor
from typing import assert_never

from kvir.kernels.score_ops import Take
from kvir.policy_ir.budgets import (
    Blend,
    FixedTokens,
    PerHead,
    PerLayer,
    Preference,
    Protect,
    Ramp,
    Rounding,
    Total,
)
from kvir.policy_ir.budgets import Fraction as Share
from kvir.policy_ir.terms import TopK


@dataclass(frozen=True)
class Lengths:
    """What a budget is a share of, or limited by; tokens of one sequence."""

    n: int
    prompt: int
    inside: int
    candidates: int


def unit_budget(term: TopK, lengths: Lengths, unit: tuple[int, int], ramp: tuple[int, int]) -> int | None:
    """Rows that the term may choose in one unit, before floors, caps and lengths; None keeps all.

    Negative if the other terms keep more than the budget.  `unit` is (layer, head) in budget tables, `ramp`
    (index, count) of its layer among those that the term governs.  Raises ValueError for `total`, of which a
    unit has no part of its own.
    """
    match term.budget:
        case FixedTokens(tokens=rows) | Preference(mean=rows):
            pass
        case Share(share=share, of=of, rounding=rounding):
            rows = _round(_decimal(share) * (lengths.n if of == "sequence" else lengths.prompt), rounding)
        case PerLayer(tokens=tokens):
            rows = tokens[unit[0]]
        case PerHead(table=table):
            rows = table[unit[0]][unit[1]]
        case Ramp():
            if term.scope == "model":  # rivals of all layers: only the mean is left of the line
                rows = term.budget.mean
            else:
                return _ramp(term.budget, lengths, *ramp)
        case Total():
            raise ValueError("`total` is a budget of units together")
        case _:
            assert_never(term.budget)
    return None if rows is None else rows - lengths.inside


def group_take(
    term: TopK, lengths: Lengths, budgets: Sequence[int], group: int, available: int | None = None
) -> Take:
    """What `group` rivals take together; `budgets` are their own budgets, empty for `total`.

    A floor raises the total, a cap lowers it, and there are no more rows than candidates: `available` of all
    rivals together, by default as many in each.
    """
    available = group * lengths.candidates if available is None else available
    match term.budget:
        case Total(tokens=tokens):
            rows = max(0, tokens - group * lengths.inside)
        case _:
            rows = max(0, sum(budgets))
    if group == 1:
        return Take(rows=min(rows, lengths.candidates))
    rows = max(rows, group * term.floor)
    rows = rows if term.cap is None else min(rows, group * term.cap)
    rows = min(rows, available)
    safe, blend = term.floor, None
    match term.safeguard:
        case None:
            pass
        case Protect(share=share):
            # the share is of the whole budget, of which the rows of other terms come first
            whole = Fraction(rows, group) + lengths.inside
            safe = max(safe, floor(_decimal(share) * whole) - lengths.inside)
        case Blend(share=share):
            blend = (share, Fraction(rows, group))
        case _:
            assert_never(term.safeguard)
    return Take(rows=rows, safe_rows=safe, cap_rows=term.cap, blend=blend)


def _ramp(ramp: Ramp, lengths: Lengths, index: int, count: int) -> int:
    """Rows to choose in layer `index` of `count` (PyramidKV, arXiv:2406.02069, and its codes)."""
    inside = lengths.inside
    base = ramp.mean if ramp.line == "kept" else max(0, ramp.mean - inside)
    above = inside if ramp.line == "kept" else 0  # rows of the line that are not chosen by score
    flat = max(0, base - above)
    if count == 1 or (ramp.line == "selected" and lengths.n < 2 * base):
        return flat
    low = Fraction(base // ramp.ratio) if ramp.arithmetic == "integer" else Fraction(base, ramp.ratio)
    high = 2 * base - low
    if high > lengths.candidates:
        high = Fraction(lengths.candidates)
        low = 2 * base - high
    if not high >= low >= above:
        return flat
    if ramp.arithmetic == "integer":
        return max(0, int(high) - index * (int(high - low) // (count - 1)) - above)
    return max(0, _round(high - index * (high - low) / (count - 1), ramp.rounding) - above)


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
