"""BoundPolicy -> BudgetedPolicy: one retention per unit and phase (KV3xx).

* A union of several `sink` or `recent` terms is the largest of each.
* A native sliding window of w tokens is a mandatory `recent: w`: the unit keeps the last min(n, w) rows.  Its
  sinks are dropped: the model was never trained to see rows older than w, and a sink would fall out of the
  window anyway.  A selection by score has no effect there either.
* Decode may never keep a row by position that prefill dropped by position: it is gone.  A selection only
takes
  away, so it may follow anything, and what follows it takes from what it left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, assert_never

from kvir.lowering.budget_findings import check_selections
from kvir.lowering.places import NOTHING, WINDOWS, rule_name, rule_place
from kvir.lowering.selections import RuleSelections, selects
from kvir.lowering.stage_words import words
from kvir.lowering.stages import AttentionLayer, BoundPolicy, BudgetedPolicy, Retention
from kvir.policy_ir.diagnostic import Label, Report
from kvir.policy_ir.nodes import All, Phase, Policy, Recent, Rule, Sink, TopK, TopP

EVERYTHING = Retention(sink_tokens=0, recent_tokens=None)

Table = tuple[tuple[Retention, ...], ...]  # [layer_index][kv_head]


@dataclass(frozen=True)
class Budget:
    name: ClassVar[str] = "budget"
    report: Report

    def __call__(self, bound: BoundPolicy) -> BudgetedPolicy:
        prefill, decode = retentions(bound, "prefill"), retentions(bound, "decode")
        self._decode_within_prefill(bound, prefill, decode)
        self._sinks_in_native_windows(bound)
        check_selections(bound, self.report)
        return BudgetedPolicy(bound=bound, prefill=prefill, decode=decode)

    def _decode_within_prefill(self, bound: BoundPolicy, prefill: Table, decode: Table) -> None:
        policy = bound.verified.policy
        seen: set[tuple[int, int]] = set()
        for index, layer in enumerate(bound.model.layers):
            for head in range(layer.kv_heads):
                rules = bound.prefill_rule[index][head], bound.decode_rule[index][head]
                before, after = prefill[index][head], decode[index][head]
                if rules in seen or within(after, before) or not all(_sound(policy, r) for r in rules):
                    continue
                seen.add(rules)
                span = rule_place(self.report, rules[1])
                first = rule_place(self.report, rules[0])
                self.report.error(
                    "KV301",
                    f"decode would keep rows that prefill dropped: layer {layer.layer_id}, head {head} keeps "
                    f"{words(before)} in prefill by {rule_name(rules[0])}, "
                    f"and {words(after)} in decode by {rule_name(rules[1])}",
                    span or first,
                    labels=(Label(first, "prefill drops rows here"),) if span and first else (),
                    help="let decode keep at most what prefill keeps: "
                    "give prefill the larger `sink` and `recent`, or leave `phase` out",
                )

    def _sinks_in_native_windows(self, bound: BoundPolicy) -> None:
        """Warn once per rule that loses its sinks to a native window although its own is narrower."""
        seen: set[int] = set()
        for governed in (bound.prefill_rule, bound.decode_rule):
            for index, layer in enumerate(bound.model.layers):
                for head, rule in enumerate(governed[index]):
                    native = layer.native_window_tokens
                    if rule in seen or native is None:
                        continue
                    own = _asked(bound.verified.policy, rule, index, head)
                    if own is None or own.recent_tokens is None:
                        continue
                    if own.sink_tokens and own.recent_tokens < native:
                        seen.add(rule)
                        self.report.warning(
                            "KV302",
                            f"`sink` has no effect in layer {layer.layer_id}, "
                            f"whose own sliding window is {native} tokens",
                            rule_place(self.report, rule),
                            help="leave the sliding layers out of the rule; they are cheap already",
                        )


def retentions(bound: BoundPolicy, phase: Phase) -> Table:
    """What each unit keeps, native windows intersected.  Units under a rule that was reported keep
    everything.
    """
    policy = bound.verified.policy
    governed = bound.prefill_rule if phase == "prefill" else bound.decode_rule
    by_position: dict[int, Retention | None] = {}
    by_score: dict[int, RuleSelections] = {}
    for i in {rule for row in governed for rule in row if rule >= 0}:
        if selects(policy.rules[i]) and not any(isinstance(t, All) for t in policy.rules[i].keep):
            by_score[i] = RuleSelections(bound, i, phase)
        else:
            by_position[i] = asked(policy.rules[i])

    def one(index: int, head: int, layer: AttentionLayer, rule: int) -> Retention:
        if rule in by_score:
            if layer.native_window_tokens is not None:
                return intersect(EVERYTHING, layer)
            chosen = by_score[rule].of((index, head))
            return Retention(sink_tokens=0, recent_tokens=None, selection=chosen)
        found = by_position[rule] if rule >= 0 else _asked(policy, rule, index, head)
        return intersect(found or EVERYTHING, layer)

    return tuple(
        tuple(one(index, head, layer, rule) for head, rule in enumerate(governed[index]))
        for index, layer in enumerate(bound.model.layers)
    )


def asked(rule: Rule) -> Retention | None:
    """What a rule asks for by position, or None if it makes no sense (reported already)."""
    sink, recent = 0, 0
    for term in rule.keep:
        match term:
            case All():
                return EVERYTHING
            case Sink(tokens=n):
                sink = max(sink, n)
            case Recent(tokens=n):
                recent = max(recent, n)
            case TopK() | TopP():
                pass
            case _:
                assert_never(term)
    return Retention(sink_tokens=sink, recent_tokens=recent) if recent else None


def intersect(retention: Retention, layer: AttentionLayer) -> Retention:
    """What the unit keeps inside the layer's own sliding window."""
    native = layer.native_window_tokens
    if native is None:
        return retention
    recent = native if retention.recent_tokens is None else min(native, retention.recent_tokens)
    return Retention(sink_tokens=0, recent_tokens=recent)


def within(inner: Retention, outer: Retention) -> bool:
    """Whether `inner` keeps no row by position that `outer` drops by position, at any length."""
    if outer.recent_tokens is None or inner.selection is not None:
        return True
    if inner.recent_tokens is None:
        return False
    return inner.sink_tokens <= outer.sink_tokens and inner.recent_tokens <= outer.recent_tokens


def _sound(policy: Policy, rule: int) -> bool:
    """Whether what governs a unit makes sense, i.e. was not reported: a broken table governs nothing."""
    if rule == NOTHING:
        return policy.windows is None
    return rule == WINDOWS or selects(policy.rules[rule]) or asked(policy.rules[rule]) is not None


def _asked(policy: Policy, rule: int, index: int, head: int) -> Retention | None:
    """What the governing rule asks of one unit."""
    if rule >= 0:
        return None if selects(policy.rules[rule]) else asked(policy.rules[rule])
    if rule == NOTHING or policy.windows is None:
        return EVERYTHING
    assert rule == WINDOWS
    window = policy.windows.table[index][head]
    if window is None:
        return EVERYTHING
    return Retention(sink_tokens=policy.windows.sink, recent_tokens=window)
