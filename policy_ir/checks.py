"""Rules about score-based terms that need only the policy (KV110 to KV119); `lowering/verify` calls `check`.

Everything here is about one rule at a time.  Places are paths that `Source.span` resolves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from msgspec import Struct

from kvir.policy_ir.budgets import FixedTokens, PerHead, PerLayer, Preference, Ramp
from kvir.policy_ir.diagnostic import Report
from kvir.policy_ir.nodes import Policy, Rule
from kvir.policy_ir.pools import AveragePool, MaxPool
from kvir.policy_ir.rules import Every, Evict, Over, PrefillChunk, PrefillEnd
from kvir.policy_ir.scores import (
    CriticalKV,
    KeyDiff,
    KeyNorm,
    Redundancy,
    Rkv,
    Score,
    Sum,
    ValueWeighted,
)
from kvir.policy_ir.source import Span
from kvir.policy_ir.terms import Recent, Sink, TopK, TopP

Selecting = TopK | TopP


def check(policy: Policy, report: Report) -> None:
    """Add to the report what is wrong with the score-based parts of a policy."""
    for i, rule in enumerate(policy.rules):
        _Checker(report, f"$.rules[{i}]").rule(rule)


class _Checker:
    """Checks one rule; paths are relative to it."""

    def __init__(self, report: Report, root: str) -> None:
        self._report = report
        self._root = root

    def rule(self, rule: Rule) -> None:
        selecting = [(i, term) for i, term in enumerate(rule.keep) if isinstance(term, Selecting)]
        if not selecting:
            self._without_selection(rule)
            return
        self._trigger(rule)
        for i, term in selecting:
            self._bounds(term, f".keep[{i}]")
            if isinstance(term, TopP):
                self._mass(term, f".keep[{i}]")
            else:
                self._units(term, f".keep[{i}]")
                self._tables(term, f".keep[{i}]")
                self._rest(term, rule, f".keep[{i}]")
        kept = [i for i, term in selecting if isinstance(term, TopK) and term.counts == "kept"]
        if kept and len(selecting) > 1:
            self._error(
                "KV117",
                "`counts: kept` needs to know what the other terms keep, and another term selects by score",
                f".keep[{kept[0]}].counts",
                "use `counts: selected` where several terms select",
            )
        for path, part in _parts(rule, ""):
            if isinstance(part, AveragePool | MaxPool) and part.width % 2 == 0:
                help = f"use {part.width - 1} or {part.width + 1}"
                self._error("KV116", f"the pool width {part.width} is even", f"{path}.width", help)

    def _without_selection(self, rule: Rule) -> None:
        unused = {
            "trigger": rule.trigger != (),
            "overflow": rule.overflow != Evict(),
            "region": rule.region != "all",
        }
        for name, given in unused.items():
            if given:
                self._report.warning(
                    "KV113",
                    f"`{name}` has no effect: no term of the rule selects by score",
                    self._place(f".{name}"),
                    help="windows slide by themselves; remove the field, or add `top_k` or `top_p`",
                )

    def _trigger(self, rule: Rule) -> None:
        in_prefill = any(isinstance(t, PrefillChunk | PrefillEnd) for t in rule.trigger) or not rule.trigger
        in_decode = any(isinstance(t, Every | Over) for t in rule.trigger)
        if (rule.phase == "decode" and not in_decode) or (rule.phase == "prefill" and not in_prefill):
            wanted = "`trigger: {every: 128}`" if rule.phase == "decode" else "`trigger: prefill_end`"
            which = "the trigger" if rule.trigger else "the default trigger, `prefill_end`,"
            self._error(
                "KV111",
                f"{which} never fires in phase `{rule.phase}`, so the scores would never be used",
                ".trigger" if rule.trigger else ".phase",
                f"write {wanted}, or leave `phase` out",
            )

    def _bounds(self, term: Selecting, path: str) -> None:
        if term.cap is not None and term.floor > term.cap:
            message = f"the floor {term.floor} is above the cap {term.cap}"
            self._error("KV110", message, f"{path}.floor", f"lower `floor` to {term.cap}, or raise `cap`")

    def _mass(self, term: TopP, path: str) -> None:
        score, field = (term.by, "by") if term.of is None else (term.of, "of")
        if negative(score):
            tag = type(score).__struct_config__.tag
            self._error(
                "KV119",
                f"`top_p` counts the mass of a distribution, and `{tag}` has negative scores",
                f"{path}.{field}",
                "add `of: attention`, which counts; the rows are still chosen `by` the other score"
                if field == "by"
                else "write `of: attention`",
            )

    def _units(self, term: TopK, path: str) -> None:
        alone = term.scope == "head"
        if (term.tie == "layer" and term.scope == "layer") or (term.tie == "model" and not alone):
            self._error(
                "KV114",
                f"units with the same rows (`tie: {term.tie}`) cannot compete over `scope: {term.scope}`",
                f"{path}.tie",
                "use a wider scope, or leave `scope` out",
            )
        for name, given in (("floor", term.floor > 0), ("cap", term.cap), ("safeguard", term.safeguard)):
            if given and alone:
                self._report.warning(
                    "KV112",
                    f"`{name}` has no effect with `scope: head`: every unit has its own budget",
                    self._place(f"{path}.{name}"),
                    help="write `scope: layer` or `scope: model`, or remove the field",
                )

    def _tables(self, term: TopK, path: str) -> None:
        match term.budget:
            case PerLayer(tokens=()):
                self._error(
                    "KV115", "the budget table is empty", f"{path}.budget", "give one figure per layer"
                )
            case PerHead(table=table) if len({len(row) for row in table}) != 1 or not table[0]:
                message = (
                    "the rows of the budget table have different lengths" if table else "the table is empty"
                )
                help = "give one row per layer, with one figure per KV head in it"
                self._error("KV115", message, f"{path}.budget", help)
            case _:
                pass

    def _rest(self, term: TopK, rule: Rule, path: str) -> None:
        match term.budget:
            case FixedTokens(tokens=budget) | Ramp(mean=budget) | Preference(mean=budget):
                pass
            case _:
                return
        others = sum(t.tokens for t in rule.keep if isinstance(t, Sink | Recent))
        if term.counts == "kept" and others >= budget:
            self._error(
                "KV118",
                f"the other terms keep {others} rows, so a budget of {budget} leaves nothing to select",
                f"{path}.budget",
                f"raise the budget above {others}, or use `counts: selected`",
            )

    # ---- findings ------------------------------------------------------------------------------------------

    def _error(self, code: str, message: str, path: str, help: str) -> None:
        self._report.error(code, message, self._place(path), help=help)

    def _place(self, path: str) -> Span | None:
        source = self._report.source
        return None if source.root is None else source.span(self._root + path)


def negative(score: Score) -> bool:
    """Whether a score is below zero by its nature."""
    match score:
        case KeyNorm() | KeyDiff() | Redundancy() | Rkv():
            return True
        case CriticalKV(base=base) | ValueWeighted(base=base):
            return negative(base)
        case Sum(parts=parts):
            return any(p.weight < 0 or p.scale == "z_score" or negative(p.score) for p in parts)
        case _:
            return False


def _parts(node: Struct, path: str) -> Iterator[tuple[str, Struct]]:
    """Every struct inside a struct, with its path."""
    for name in node.__struct_fields__:
        value = getattr(node, name)
        if isinstance(value, tuple):
            items = cast("tuple[object, ...]", value)
            found = [(f"{path}.{name}[{i}]", item) for i, item in enumerate(items)]
        else:
            found = [(f"{path}.{name}", value)]
        for where, part in found:
            if isinstance(part, Struct):
                yield where, part
                yield from _parts(part, where)
