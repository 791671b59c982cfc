"""A request under a plan that selects, row by row: which rows each unit holds, and in how many pages.

Slow and obvious.  It reads the policy itself, not the figures of lowering; scores are drawn at random.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil, floor

from kvir.lowering.stages import LayoutPlan
from kvir.policy_ir.budgets import Blend, FixedTokens, PerHead, Protect, Total
from kvir.policy_ir.budgets import Fraction as Share
from kvir.policy_ir.nodes import Recent, Rule, Sink, TopK, TopP
from kvir.policy_ir.rules import Every, Over, PrefillChunk, PrefillEnd

Rows = set[int]


@dataclass
class Unit:
    layer: int
    head: int
    prefill: Rule | None
    decode: Rule | None
    held: Rows = field(default_factory=set)
    compact: int = 0  # rows in compact pages
    dense_from: int = 0  # first token of the dense pages
    folded: bool = False  # rows have moved to compact pages
    slid: int = 0  # dense pages that slid out
    pages: int = 0


class Request:
    """Runs a prompt and then tokens, one at a time."""

    def __init__(self, layout: LayoutPlan, prompt: int, chunk: int, seed: int) -> None:
        bound = layout.budgeted.bound
        rules = bound.verified.policy.rules
        self.size, self.prompt, self.chance = layout.page_tokens, prompt, random.Random(seed)
        self.units = [
            Unit(i, h, _rule(rules, bound.prefill_rule[i][h]), _rule(rules, bound.decode_rule[i][h]))
            for i in range(layout.unit_count // layout.kv_heads)
            for h in range(layout.kv_heads)
        ]
        self.n = self.peak = 0
        self._prefill(chunk)

    @property
    def pages(self) -> int:
        return sum(unit.pages for unit in self.units)

    def step(self) -> None:
        """One generated token, then the selections that it triggers."""
        self._append(1)
        ready: list[Unit] = []
        for rule in {id(u.decode): u.decode for u in self.units if u.decode is not None}.values():
            mine = [u for u in self.units if u.decode is rule]
            for rivals in self._rivals(rule, mine):
                held = rivals[0].held
                if any(self._fires(u, rule) for u in rivals) and (
                    any(u.folded for u in rivals) or not self._all_stay(rule, self.n, held, rivals)
                ):
                    ready += rivals
        self._select(ready, "decode")

    # ---- parts ---------------------------------------------------------------------------------------------

    def _prefill(self, chunk: int) -> None:
        """Rivals advance by themselves, in chunks of their own; their peaks add up to a bound."""
        alike: list[list[Unit]] = []
        for rule in {id(u.prefill): u.prefill for u in self.units}.values():
            mine = [u for u in self.units if u.prefill is rule]
            alike += [mine] if rule is None else self._rivals(rule, mine)
        peaks = 0
        for units in alike:
            self.n = self.peak = 0
            rule = units[0].prefill
            if rule is not None and not _selects(rule):
                peaks += self._windows(rule, units)
                continue
            triggers = () if rule is None or not _selects(rule) else rule.trigger or (PrefillEnd(),)
            sizes = [t.tokens or chunk for t in triggers if isinstance(t, PrefillChunk)]
            every = min([*sizes, self.prompt])
            ends = any(isinstance(t, PrefillEnd) and self.prompt > t.over for t in triggers)
            # whether a prompt is compacted is known before it is read
            runs = (
                (sizes or ends)
                and rule is not None
                and not self._all_stay(rule, self.prompt, set(range(self.prompt)), units)
            )
            for start in range(0, self.prompt, every):
                self._append(min(every, self.prompt - start), units)
                if runs and (sizes or self.n == self.prompt):
                    self._select(units, "prefill")
            peaks += self.peak
        self.n, self.peak = self.prompt, peaks

    def _windows(self, rule: Rule, units: list[Unit]) -> int:
        """Units whose rows go by position in prefill; their peak.  Only what survives is ever written."""
        peak = 0
        for n in range(1, self.prompt + 1):
            self.n = n
            self._slide(rule, units)
            peak = max(peak, sum(u.pages for u in units))
        return peak

    def _slide(self, rule: Rule, units: list[Unit]) -> None:
        """What windows leave of the prompt: whole pages, the window lagging to the page floor."""
        sink, recent = _sink(rule), _recent(rule)
        floor_ = self.n // self.size * self.size
        rows = {r for r in range(self.n) if r < sink or r > floor_ - recent}
        rows |= set(range(min(self.n, ceil(sink / self.size) * self.size)))
        for unit in units:
            # what the next query would see
            unit.held = {r for r in range(self.n) if r < sink or r > self.n - recent}
            unit.slid = ceil(self.n / self.size) - len({r // self.size for r in rows})
            self._count(unit)

    def _append(self, count: int, units: list[Unit] | None = None) -> None:
        self.n += count
        for unit in units or self.units:
            unit.held |= set(range(self.n - count, self.n))
            self._count(unit)
        self.peak = max(self.peak, sum(u.pages for u in units or self.units))

    def _count(self, unit: Unit) -> None:
        dense = ceil(self.n / self.size) - unit.dense_from // self.size - unit.slid
        unit.pages = ceil(unit.compact / self.size) + dense

    def _fires(self, unit: Unit, rule: Rule) -> bool:
        for t in rule.trigger if _selects(rule) else ():
            if isinstance(t, Every) and (self.n - self.prompt) % t.tokens == 0:
                return True
            if isinstance(t, Over) and len(unit.held) > t.tokens:
                return True
        return False

    def _select(self, units: list[Unit], phase: str) -> None:
        kept: dict[int, Rows] = {id(u): set() for u in units}
        governed = {id(rule): rule for u in units if (rule := u.prefill if phase == "prefill" else u.decode)}
        for rule in governed.values():
            mine = [u for u in units if (u.prefill if phase == "prefill" else u.decode) is rule]
            for unit, rows in zip(mine, self._chosen(rule, mine), strict=True):
                kept[id(unit)] = rows
        fresh = 0
        for unit in units:
            rows = kept[id(unit)]
            rule = unit.prefill if phase == "prefill" else unit.decode
            assert rule is not None
            tail = self.n // self.size * self.size
            stays = _recent(rule) >= self.size - 1
            moved = len([row for row in rows if row < tail]) if stays else len(rows)
            fresh += max(0, ceil(moved / self.size) - ceil(unit.compact / self.size))
            self.peak = max(self.peak, sum(u.pages for u in units) + fresh)
            unit.held, unit.compact, unit.dense_from, unit.folded = set(rows), moved, tail, True
            unit.slid = 0
        for unit in units:
            self._count(unit)

    def _rivals(self, rule: Rule, units: list[Unit]) -> list[list[Unit]]:
        """Units that select at the same moment: those that compete by any term."""
        scopes = {t.scope for t in rule.keep if isinstance(t, TopK)}
        if "model" in scopes:
            return [units]
        if "layer" in scopes:
            return [[u for u in units if u.layer == layer] for layer in sorted({u.layer for u in units})]
        return [[u] for u in units]

    def _all_stay(self, rule: Rule, n: int, held: Rows, units: list[Unit]) -> bool:
        """Whether every row is sure to stay, whatever the scores are."""
        may_go = [r for r in held if _sink(rule) <= r < n - _recent(rule)]
        if rule.region != "all":
            may_go = [r for r in may_go if (r < self.prompt) == (rule.region == "prompt")]
        candidates = len(may_go)
        if not candidates:
            return True
        inside = _sink(rule) + _recent(rule)
        for term in rule.keep:
            if isinstance(term, TopP) and term.floor >= candidates:
                return True
            if isinstance(term, TopK):
                self.n, saved = n, self.n
                members = {"head": units[:1], "layer": [u for u in units if u.layer == units[0].layer]}
                rivals = members.get(term.scope, units)
                total = self._total(term, inside if term.counts == "kept" else 0, rivals)
                if len(rivals) > 1:
                    total = max(total, len(rivals) * term.floor)
                    total = min(total, len(rivals) * (term.cap or total))
                self.n = saved
                if total >= len(rivals) * candidates:
                    return True
        return False

    def _chosen(self, rule: Rule, units: list[Unit]) -> list[Rows]:
        """What the terms of a rule keep of each unit."""
        sink, recent = _sink(rule), _recent(rule)
        always = [{r for r in u.held if r < sink or r >= self.n - recent} for u in units]
        if rule.region == "prompt":
            may_go = [{r for r in u.held if r < self.prompt} for u in units]
        elif rule.region == "generated":
            may_go = [{r for r in u.held if r >= self.prompt} for u in units]
        else:
            may_go = [set(u.held) for u in units]
        kept = [a | (u.held - m) for a, u, m in zip(always, units, may_go, strict=True)]
        candidates = [sorted(m - a) for m, a in zip(may_go, always, strict=True)]
        for term in rule.keep:
            if isinstance(term, TopP):
                chosen = [self._nucleus(term, rows) for rows in candidates]
            elif isinstance(term, TopK):
                chosen = self._top_k(term, sink + recent, units, candidates)
            else:
                continue
            kept = [a | b for a, b in zip(kept, chosen, strict=True)]
        return kept

    def _nucleus(self, term: TopP, rows: list[int]) -> Rows:
        low = min(term.floor, len(rows))
        high = max(low, min(len(rows), len(rows) if term.cap is None else term.cap))
        return set(self.chance.sample(rows, self.chance.randint(low, high)))

    def _top_k(self, term: TopK, others: int, units: list[Unit], candidates: list[list[int]]) -> list[Rows]:
        inside = others if term.counts == "kept" else 0
        skew = [self.chance.random() for _ in units]
        ranked = [
            sorted(((self.chance.random() + skew[i], i, row) for row in rows), reverse=True)
            for i, rows in enumerate(candidates)
        ]
        result: list[Rows] = [set() for _ in units]
        groups: dict[object, list[int]] = {}
        for i, unit in enumerate(units):
            key = {"head": (unit.layer, unit.head), "layer": unit.layer, "model": 0}[term.scope]
            groups.setdefault(key, []).append(i)
        for members in groups.values():
            total = self._total(term, inside, [units[i] for i in members])
            alone = len(members) == 1
            if not alone:
                total = max(total, len(members) * term.floor)
                total = total if term.cap is None else min(total, len(members) * term.cap)
            counts = self._counts(term, total, [ranked[i] for i in members]) if not alone else [total]
            for i, count in zip(members, counts, strict=True):
                result[i] = {row for _, _, row in ranked[i][:count]}
        return result

    def _total(self, term: TopK, inside: int, members: list[Unit]) -> int:
        """The rows of rivals together."""
        match term.budget:
            case FixedTokens(tokens=tokens):
                return sum(max(0, tokens - inside) for _ in members)
            case Share(share=share, of=of, rounding=rounding):
                exact = Fraction(str(share)) * (self.n if of == "sequence" else self.prompt)
                whole = {"down": floor(exact), "up": ceil(exact), "nearest": floor(exact + Fraction(1, 2))}
                return sum(max(0, whole[rounding] - inside) for _ in members)
            case Total(tokens=tokens):
                return max(0, tokens - inside * len(members))
            case PerHead(table=table):
                figures = [table[u.layer][u.head] for u in members]
                return max(0, sum(f for f in figures if f is not None) - inside * len(members))
            case _:
                raise NotImplementedError(term.budget)

    def _counts(self, term: TopK, total: int, ranked: list[list[tuple[float, int, int]]]) -> list[int]:
        """How many rows each of some rivals gets."""
        share = term.safeguard.share if term.safeguard is not None else 0
        safe = (
            floor(Fraction(str(share)) * Fraction(total, len(ranked)))
            if isinstance(term.safeguard, Protect)
            else 0
        )
        safe = max(safe, term.floor)
        cap = term.cap or 1 << 30
        counts = [min(safe, len(rows)) for rows in ranked]
        rest = sorted((x for rows in ranked for x in rows[safe:cap]), reverse=True)
        index = {id(x): i for i, rows in enumerate(ranked) for x in rows}
        for x in rest[: max(0, total - sum(counts))]:
            counts[index[id(x)]] += 1
        if isinstance(term.safeguard, Blend):
            a, mean = Fraction(str(share)), Fraction(min(total, sum(map(len, ranked))), len(ranked))
            counts = [floor(c * (1 - a) + a * mean + Fraction(1, 2)) for c in counts]
        return counts


def _rule(rules: tuple[Rule, ...], index: int) -> Rule | None:
    return rules[index] if index >= 0 else None


def _selects(rule: Rule) -> bool:
    return any(isinstance(t, TopK | TopP) for t in rule.keep)


def _sink(rule: Rule) -> int:
    return max((t.tokens for t in rule.keep if isinstance(t, Sink)), default=0)


def _recent(rule: Rule) -> int:
    return max((t.tokens for t in rule.keep if isinstance(t, Recent)), default=0)
