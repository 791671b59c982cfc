"""Floors and caps of Hard-KV for each KV head, from the rows that a calibrated plan gives heads of a prompt.

While decoding, a head's nucleus says how much it attends to now, not what will be asked of it later: heads
that look facts up are sharp, keep little, and lose them.  What each head needs is known from calibration; the
nucleus then moves between limits around it.  docs/hardkv.md has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvir.lowering.quota import first_run, kept_rows
from kvir.lowering.stages import BudgetedPolicy, Retention, ShareAmount
from kvir.policy_ir.budgets import FixedTokens
from kvir.policy_ir.nodes import IndexRange, Rule
from kvir.policy_ir.rules import Every
from kvir.policy_ir.scores import Attention
from kvir.policy_ir.terms import Recent, Sink, TopK, TopP

WINDOW = 32  # last queries whose attention ranks and measures
LEAST_ROWS = 4  # of a head, beside the recent ones
WHOLE = 0.7  # a head whose calibrated share is at least this may keep everything
SLACK = 0.5, 1.25  # floor and cap of a head, of its budget

Unit = tuple[int, int]  # (layer, KV head)


def head_shares(budgeted: BudgetedPolicy, tokens: int) -> dict[Unit, float]:
    """The share of a prompt of `tokens` that a plan gives each KV head of the attention layers."""
    return {
        (layer, head): _share(retention, tokens)
        for layer, row in enumerate(budgeted.prefill)
        for head, retention in enumerate(row)
    }


def head_budgets(
    shares: Mapping[Unit, float], mean: int, answer_tokens: int, recent: int
) -> dict[Unit, int | None]:
    """Rows of an answer for each head, in proportion to its share, `mean` on average over the answer's
    course; None: all.  At most half of all rows go to heads that keep everything."""
    most = mean * len(shares) // answer_tokens  # a head that keeps all holds half of the answer on average
    ranked = sorted(shares, key=lambda unit: -shares[unit])
    whole = {unit for unit in ranked[:most] if shares[unit] >= WHOLE}
    left = mean * len(shares) - len(whole) * answer_tokens / 2
    others = {unit: share for unit, share in shares.items() if unit not in whole}
    least = recent + LEAST_ROWS
    scale = max(0.0, (left - least * len(others)) / (sum(others.values()) or 1.0))
    return {u: None if u in whole else least + round(scale * shares[u]) for u in shares}


def limits(rows: int, recent: int) -> tuple[int, int]:
    """Floor and cap of a head with such a budget."""
    low, high = (max(1, round(part * (rows - recent))) for part in SLACK)
    return low, high


def hardkv_rules(
    budgets: Mapping[Unit, int | None],
    layer_ids: Sequence[int],
    *,
    mass: float | None,
    every: int,
    recent: int,
    sink: int,
) -> tuple[Rule, ...]:
    """A rule per KV head: a nucleus of `mass` between its limits, or, if None, its number of rows.  Heads
    that keep everything need none."""
    by, rules = Attention(window=WINDOW), list[Rule]()
    for (layer, head), rows in budgets.items():
        if rows is None:
            continue
        floor, cap = limits(rows, recent)
        term = TopK(budget=FixedTokens(tokens=rows - recent), by=by)
        if mass is not None:
            term = TopP(mass=mass, by=by, of=by, floor=floor, cap=cap)
        rules.append(
            Rule(
                layers=(IndexRange(first=layer_ids[layer], last=layer_ids[layer]),),
                heads=(IndexRange(first=head, last=head),),
                keep=(Sink(tokens=sink), Recent(tokens=recent), term),
                trigger=(Every(tokens=every),),
                region="generated",
            )
        )
    return tuple(rules)


def _share(retention: Retention, tokens: int) -> float:
    if retention.selection is None:
        if retention.recent_tokens is None:
            return 1.0
        return min(1.0, (retention.sink_tokens + retention.recent_tokens) / tokens)
    for quota in retention.selection.quotas:
        if isinstance(quota.amount, ShareAmount) and quota.group == 1:
            return quota.amount.share
    kept = kept_rows(first_run(retention.selection, tokens, tokens))
    return min(1.0, (kept.least + kept.most) / 2 / tokens)
