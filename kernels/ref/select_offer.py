"""What a layer puts up for a selection: scores of its rows, or the rows themselves where no rivals matter.

Rivals of several layers are never in memory together while a server computes: each layer makes an `Offer`
when its keys are known, and `select_rule.choose` decides when all rivals have offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import torch
from torch import Tensor

from kvir.kernels.ref.score import score_parts, score_per_query
from kvir.kernels.ref.select_budget import Lengths, unit_budget
from kvir.kernels.ref.select_mass import select_top_p
from kvir.kernels.ref.select_preference import layer_preference
from kvir.kernels.score_ops import ScoreInputs
from kvir.policy_ir.budgets import Preference, Total
from kvir.policy_ir.rules import Region, Rule
from kvir.policy_ir.scores import CriticalKV
from kvir.policy_ir.terms import All, Recent, Sink, Term, TopK, TopP

Unit = tuple[int, int]  # (layer, head)
Governed = Mapping[int, tuple[int, ...]]  # layer -> its heads that a rule governs, in order


@dataclass(frozen=True)
class LayerState:
    """Heads of one layer that hold equally many rows: the inputs of their scores (candidates are filled in),
    and which of them the rule governs.
    """

    inputs: ScoreInputs
    heads: tuple[int, ...]  # from inputs.first_head on


@dataclass(frozen=True)
class UnitOffer:
    """What one unit puts up for a selection; small beside its K and V."""

    rows: int
    device: torch.device  # where its rows are
    candidates: tuple[int, int]
    positions: Tensor | None
    # per term of the rule: scores [rows] of a `top_k`, rows that a `top_p` keeps
    terms: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Offer:
    """What one layer puts up."""

    layer: int
    length: int  # of the sequence in tokens
    units: Mapping[int, UnitOffer]  # by head
    preferences: tuple[float, ...]  # per term, of budgets by preference


def offer(rule: Rule, parts: Sequence[LayerState], governed: Governed, prompt: int, length: int) -> Offer:
    """What one of the `governed` layers puts up, at `length` tokens, of which `prompt` are the prompt."""
    start, stop = candidate_rows(rule.keep, rule.region, length, prompt)
    filled: list[LayerState] = []
    for part in parts:
        positions = part.inputs.positions
        run = (start, stop)
        if positions is not None:
            run = (int((positions < start).sum()), int((positions < stop).sum()))
        filled.append(replace(part, inputs=replace(part.inputs, candidates=run)))
    columns: list[dict[int, Tensor]] = []
    preferences: list[float] = []
    for term in rule.keep:
        found: dict[int, Tensor] = {}
        preference = 0.0
        match term:
            case All() | Sink() | Recent():
                pass
            case TopK():
                inside = inside_rows(term, rule.keep)
                found, preference = _scored(term, filled, governed, prompt, length, inside)
            case TopP():
                found = _top_p(term, filled)
            case _:
                assert_never(term)
        columns.append(found)
        preferences.append(preference)
    units: dict[int, UnitOffer] = {}
    for part in filled:
        x = part.inputs
        for head in part.heads:
            terms = tuple(c.get(head) for c in columns)
            units[head] = UnitOffer(x.k.shape[0], x.k.device, x.candidates, x.positions, terms)
    return Offer(parts[0].inputs.layer, length, dict(sorted(units.items())), tuple(preferences))


def candidate_rows(keep: Sequence[Term], region: Region, n: int, prompt: int) -> tuple[int, int]:
    """The run of rows that no term by position keeps and that may go."""
    start = min(n, max((t.tokens for t in keep if isinstance(t, Sink)), default=0))
    stop = n - min(n, max((t.tokens for t in keep if isinstance(t, Recent)), default=0))
    match region:
        case "all":
            pass
        case "prompt":
            stop = min(stop, prompt)
        case "generated":
            start = max(start, prompt)
        case _:
            assert_never(region)
    return start, max(start, stop)


def inside_rows(term: TopK, keep: Sequence[Term]) -> int:
    """Rows of terms by position that the budget of `term` counts."""
    if term.counts == "selected":
        return 0
    sink = max((t.tokens for t in keep if isinstance(t, Sink)), default=0)
    return sink + max((t.tokens for t in keep if isinstance(t, Recent)), default=0)


def _scored(
    term: TopK, parts: Sequence[LayerState], governed: Governed, prompt: int, length: int, inside: int
) -> tuple[dict[int, Tensor], float]:
    """Scores [rows] of each head, and the preference of the layer if the budget is one."""
    prefers = isinstance(term.budget, Preference)
    if prefers and isinstance(term.by, CriticalKV):
        raise ValueError("criticalkv needs its budget before it scores; `preference` knows it after")
    most = max(candidate_count(part.inputs.candidates) for part in parts)
    lengths = Lengths(length, prompt, inside, most)
    mean = most
    if not prefers:
        layer = parts[0].inputs.layer  # all its heads that the rule governs, wherever they are computed
        units = [(layer, head) for head in governed[layer]]
        budgets = [own_budget(term, unit, governed, lengths) for unit in units]
        known = [max(0, min(b, most)) for b in budgets if b is not None]
        # a score that depends on the budget is given the mean of its layer
        mean = sum(known) // len(known) if known else most
    inputs = [replace(part.inputs, inside_rows=inside, budget_rows=mean) for part in parts]
    found: dict[int, Tensor] = {}
    for part, scores in zip(parts, score_parts(term.by, inputs, term.precision), strict=True):
        found |= {head: scores[head - part.inputs.first_head] for head in part.heads}
    if not isinstance(term.budget, Preference):
        return found, 0.0
    if len(parts) > 1:
        raise ValueError("`preference` compares layers whose heads hold the same rows")
    return found, layer_preference(term.budget, inputs[0])


def own_budget(term: TopK, unit: Unit, governed: Governed, lengths: Lengths) -> int | None:
    """Rows that a unit may choose on average, if that is known without scores; None keeps all."""
    match term.budget:
        case Total(tokens=tokens):
            everywhere = sum(len(heads) for heads in governed.values())
            rivals = {"head": 1, "layer": len(governed[unit[0]]), "model": everywhere}[term.scope]
            return max(0, tokens // rivals - lengths.inside)
        case _:
            ramp = list(governed).index(unit[0]), len(governed)
            return unit_budget(term, lengths, unit, ramp)


def _top_p(term: TopP, parts: Sequence[LayerState]) -> dict[int, Tensor]:
    """Rows that the term keeps in each head."""
    chosen: dict[int, Tensor] = {}
    of = term.by if term.of is None else term.of
    inputs = [part.inputs for part in parts]
    scores = masses = score_parts(term.by, inputs, term.precision)
    if of != term.by:
        masses = score_parts(of, inputs, term.precision)
    for part, by, mass in zip(parts, scores, masses, strict=True):
        start, stop = part.inputs.candidates
        per_query = None
        if term.rows == "union" and start < stop:
            per_query = tuple(score_per_query(s, part.inputs, term.precision) for s in (term.by, of))
        for head in part.heads:
            i = head - part.inputs.first_head
            chosen[head] = start + select_top_p(
                by[i, start:stop],
                mass[i, start:stop],
                term.mass,
                floor=term.floor,
                cap=term.cap,
                on_equal=term.on_equal,
                per_query=None if per_query is None else (per_query[0][i], per_query[1][i]),
            )
    return chosen


def candidate_count(run: tuple[int, int]) -> int:
    return run[1] - run[0]
