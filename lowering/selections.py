"""Rules that select by score, in figures of one model: the `Selection` of each unit in one phase.

Units compete only with units that the same rule governs in the same phase, and that select at all: layers
with a sliding window of their own and units whose figure in a budget table is `full` do not.
"""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from kvir.lowering.stages import (
    Amount,
    BoundPolicy,
    MassAmount,
    OpenAmount,
    Quota,
    RampAmount,
    RowsAmount,
    Selection,
    ShareAmount,
    TotalAmount,
)
from kvir.policy_ir.budgets import FixedTokens, Fraction, PerHead, PerLayer, Preference, Ramp, Total
from kvir.policy_ir.nodes import Phase, Recent, Rule, Sink, TopK, TopP, Trigger
from kvir.policy_ir.rules import Every, Over, PrefillChunk, PrefillEnd
from kvir.policy_ir.scores import ScoreBase

Unit = tuple[int, int]  # (layer_index, KV head)


def selects(rule: Rule) -> bool:
    return any(isinstance(term, TopK | TopP) for term in rule.keep)


def triggers_in(rule: Rule, phase: Phase) -> tuple[Trigger, ...]:
    """The triggers of a rule that fire in one phase."""
    given = rule.trigger or (PrefillEnd(),)
    if phase == "prefill":
        return tuple(t for t in given if isinstance(t, PrefillChunk | PrefillEnd))
    return tuple(t for t in given if isinstance(t, Every | Over))


def positions(rule: Rule) -> tuple[int, int]:
    """(sink tokens, recent tokens) that a rule keeps whatever the scores are."""
    sink = max((t.tokens for t in rule.keep if isinstance(t, Sink)), default=0)
    recent = max((t.tokens for t in rule.keep if isinstance(t, Recent)), default=0)
    return sink, recent


class RuleSelections:
    """The selections of one rule in one phase."""

    def __init__(self, bound: BoundPolicy, index: int, phase: Phase) -> None:
        self._index = index
        self._rule = bound.verified.policy.rules[index]
        self._triggers = triggers_in(self._rule, phase)
        governed = bound.prefill_rule if phase == "prefill" else bound.decode_rule
        units = [
            (layer, head)
            for layer, row in enumerate(governed)
            if bound.model.layers[layer].native_window_tokens is None
            for head, rule in enumerate(row)
            if rule == index
        ]
        self._units = [unit for unit in units if not self._keeps_all(unit)]
        self._per_layer = Counter(layer for layer, _ in self._units)
        self._layers = sorted(self._per_layer)

    def of(self, unit: Unit) -> Selection | None:
        """What happens to one of the rule's units; None if nothing ever goes in this phase."""
        if not self._triggers or self._keeps_all(unit):
            return None
        sink, recent = positions(self._rule)
        return Selection(
            rule=self._index,
            triggers=self._triggers,
            quotas=tuple(
                self._quota(term, unit) for term in self._rule.keep if isinstance(term, TopK | TopP)
            ),
            sink_tokens=sink,
            recent_tokens=recent,
            region=self._rule.region,
        )

    def _keeps_all(self, unit: Unit) -> bool:
        return any(isinstance(t, TopK) and figure(t, unit) == "full" for t in self._rule.keep)

    def _quota(self, term: TopK | TopP, unit: Unit) -> Quota:
        match term:
            case TopP():
                return Quota(
                    by=tag(term.by),
                    of=None if term.of is None else tag(term.of),
                    amount=MassAmount(mass=term.mass),
                    floor=term.floor,
                    cap=term.cap,
                )
            case TopK():
                return self._top_k(term, unit)
            case _:
                assert_never(term)

    def _top_k(self, term: TopK, unit: Unit) -> Quota:
        scope, tied, step = term.scope, 1, term.block
        group = {"head": 1, "layer": self._per_layer[unit[0]], "model": len(self._units)}[scope]
        if term.tie == "layer" and scope == "model":
            tied, step = self._per_layer[unit[0]], term.block * max(self._per_layer.values())
        alone = group == 1
        if isinstance(term.budget, Preference) and scope != "model":
            bounded = scope == "layer" and (term.floor or term.cap or term.safeguard)
            if bounded or term.block > 1:
                floor, cap = (term.floor, term.cap) if scope == "layer" else (0, None)
                return Quota(by=tag(term.by), amount=OpenAmount(), floor=floor, cap=cap, block=term.block)
            # layers compete; the units of one get equally many rows, unless they compete among themselves
            heads = max(self._per_layer.values())
            scope, group, tied = "model", len(self._layers) * heads, heads if scope == "head" else 1
        return Quota(
            by=tag(term.by),
            amount=self._amount(term, unit),
            inside=sum(positions(self._rule)) if term.counts == "kept" else 0,
            scope="head" if group == 1 else scope,
            group=group,
            floor=0 if alone else term.floor,
            cap=None if alone else term.cap,
            safeguard=None if alone else term.safeguard,
            block=term.block,
            tied=tied,
            step=step if group > 1 else 1,
        )

    def _amount(self, term: TopK, unit: Unit) -> Amount:
        match term.budget:
            case FixedTokens(tokens=tokens):
                return RowsAmount(rows=tokens)
            case Fraction(share=share, of=of, rounding=rounding):
                return ShareAmount(share=share, of=of, rounding=rounding)
            case Total(tokens=tokens):
                return TotalAmount(rows=tokens)
            case Preference(mean=mean):
                return RowsAmount(rows=mean)
            case Ramp(mean=mean):
                if term.scope == "model":  # rivals of all layers: only the mean is left of the line
                    return RowsAmount(rows=mean)
                return RampAmount(
                    mean=mean,
                    ratio=term.budget.ratio,
                    arithmetic=term.budget.arithmetic,
                    rounding=term.budget.rounding,
                    line=term.budget.line,
                    index=self._layers.index(unit[0]),
                    count=len(self._layers),
                )
            case PerLayer() | PerHead():
                rivals = {"head": [unit], "layer": [u for u in self._units if u[0] == unit[0]]}
                return _table_amount(term, rivals.get(term.scope, self._units))
            case _:
                assert_never(term.budget)


def figure(term: TopK, unit: Unit) -> int | str:
    """What a budget table says of one unit: rows, `full`, or `none` where there is no such figure."""
    layer, head = unit
    match term.budget:
        case PerLayer(tokens=tokens) if layer < len(tokens):
            rows = tokens[layer]
        case PerHead(table=table) if layer < len(table) and head < len(table[layer]):
            rows = table[layer][head]
        case _:
            return "none"
    return "full" if rows is None else rows


def tag(score: ScoreBase) -> str:
    """The word that stands for a score in the text."""
    return str(type(score).__struct_config__.tag)


def _table_amount(term: TopK, rivals: list[Unit]) -> Amount:
    rows = [rows for rows in (figure(term, unit) for unit in rivals) if isinstance(rows, int)]
    return RowsAmount(rows=rows[0]) if len(rivals) == 1 and rows else TotalAmount(rows=sum(rows))
