"""Which selections of decode a GPU carries out by itself, inside of a captured step, and the memory for it.

Rules whose heads decide alone, by the mean attention of the last queries, are of that kind
(`kernels/triton/trigger.py`); of others the host reads scores, layer by layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from kvir.lowering.course import most_compact_pages
from kvir.lowering.stages import DTYPE_BYTES, LayoutPlan
from kvir.policy_ir.budgets import FixedTokens
from kvir.policy_ir.rules import Every, Evict, Over, PrefillChunk, PrefillEnd, Rule
from kvir.policy_ir.scores import Attention, LastQuery, Score
from kvir.policy_ir.terms import All, Recent, Sink, TopK, TopP

MOST_CANDIDATES = 16_384  # of one unit: their scores lie in memory for every request that can run
NO_CAP = 2**31 - 1


@dataclass(frozen=True)
class Nucleus:
    """How one unit selects: the best rows that hold a mass of the attention of the last queries.

    A fixed number of rows n is a mass of 0, a floor and a cap of n.
    """

    rule: int  # index in `policy.rules`
    window: int  # last queries that are observed
    mass: float
    floor: int
    cap: int
    candidates: int  # rows that compete, at most


@dataclass(frozen=True)
class DeviceSelections:
    """The selections of decode of a layout."""

    nuclei: dict[int, Nucleus]  # by unit
    why_not: str | None  # why the device does not carry them out; None if it does, or nothing is selected

    @property
    def window(self) -> int:
        return max((each.window for each in self.nuclei.values()), default=0)

    @property
    def candidates(self) -> int:
        return max((each.candidates for each in self.nuclei.values()), default=0)


def device_selections(layout: LayoutPlan) -> DeviceSelections:
    """Those of all units, or why there are none."""
    bound = layout.budgeted.bound
    rules, context = bound.verified.policy.rules, bound.model.context_tokens
    found: dict[int, Nucleus] = {}
    for c in layout.compact:
        if (selection := c.decode.selection) is None:
            continue
        nucleus = _nucleus(selection.rule, rules[selection.rule], context)
        if isinstance(nucleus, str):
            return DeviceSelections({}, f"rules[{selection.rule}]: {nucleus}")
        found |= dict.fromkeys(c.units, nucleus)
    return DeviceSelections(found, None)


def trigger_bytes(batch: int, ring_rows: int, layout: LayoutPlan) -> int:
    """Static memory of `kernels.triton.trigger.Trigger`, to the byte: the queries that scores look back at,
    of `ring_rows` requests, and scores and flags of the rows that compete, of `batch` requests that run.
    """
    selections = device_selections(layout)
    if not selections.nuclei:
        return 0
    layers = len(layout.budgeted.bound.model.layers)
    query = layout.query_heads * layout.head_dim * DTYPE_BYTES[layout.dtype]
    ring = ring_rows * layers * selections.window * query
    pages = max(1, *(most_compact_pages(layout, c) for c in layout.compact))
    lane = 4 * (4 + 2 + pages)  # whether it selects, rows that stay, are placed and moved, a run, head-pages
    lane += 4 * selections.window * (layout.query_heads // layout.kv_heads)  # log-sum-exp of each query
    lane += (4 + 1) * selections.candidates
    return ring + batch * layout.unit_count * lane


def _nucleus(number: int, rule: Rule, context: int) -> Nucleus | str:
    """The limits of a rule, or why it is none of this kind."""
    selecting = [term for term in rule.keep if not isinstance(term, Sink | Recent)]
    if len(selecting) != 1 or not isinstance(rule.overflow, Evict):
        return "it is not one term by score that evicts"
    (term,) = selecting
    recent = max((t.tokens for t in rule.keep if isinstance(t, Recent)), default=0)
    sink = max((t.tokens for t in rule.keep if isinstance(t, Sink)), default=0)
    match term:
        case TopP():
            plain = term == TopP(mass=term.mass, by=term.by, of=term.of, floor=term.floor, cap=term.cap)
            plain = plain and (term.of is None or _window(term.of) == _window(term.by))
            mass, floor, cap = term.mass, term.floor, NO_CAP if term.cap is None else term.cap
        case TopK(budget=FixedTokens(tokens=tokens)):
            plain = term == TopK(budget=term.budget, by=term.by, counts=term.counts)
            rows = max(0, tokens - (sink + recent if term.counts == "kept" else 0))
            mass, floor, cap = 0.0, rows, rows
        case TopK() | All():
            return "it gives heads other budgets than rows of their own"
        case _:
            assert_never(term)
    window = _window(term.by)
    if not plain or window is None:
        return "heads do not decide alone, by the mean attention of the last queries"
    if window > recent:
        return f"{window} queries look back, and only {recent} recent rows are sure to stay"
    candidates = _candidates(rule, max(floor, cap), recent, context)
    if candidates > MOST_CANDIDATES:
        return f"{candidates:,} rows of a head may compete, more than {MOST_CANDIDATES:,}"
    return Nucleus(number, window, mass, floor, cap, candidates)


def _window(score: Score) -> int | None:
    """Queries of a score that is the mean attention of the last ones."""
    match score:
        case LastQuery(group="mean"):
            return 1
        case Attention():
            return score.window if score == Attention(window=score.window) else None
        case _:
            return None


def _candidates(rule: Rule, kept: int, recent: int, context: int) -> int:
    """Rows of one unit that compete at most: those that a selection left, and those that have come since."""
    if rule.region != "generated" or kept >= context:
        return context
    fresh = 0
    for trigger in rule.trigger:
        match trigger:
            case Every(tokens=tokens):
                fresh = max(fresh, tokens)
            case Over(tokens=tokens):
                fresh = max(fresh, tokens + 1)
            case PrefillEnd() | PrefillChunk():
                continue
            case _:
                assert_never(trigger)
    return min(context, kept + fresh + recent)
