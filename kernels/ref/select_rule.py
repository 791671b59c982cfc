"""A whole rule of a policy applied to one sequence: which rows of which units stay.

This is what a selection means, from the language's terms to rows: the oracle of tests, and of any faster
implementation.  All units hold the same n rows; nothing is evicted here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

import torch
from torch import Tensor

from kvir.kernels.ref.score import score, score_per_query
from kvir.kernels.ref.select import select_top_k
from kvir.kernels.ref.select_budget import Lengths, group_take, unit_budget
from kvir.kernels.ref.select_mass import select_top_p
from kvir.kernels.ref.select_preference import layer_preference, share_out
from kvir.kernels.score_ops import ScoreInputs, Take, UnitScores
from kvir.policy_ir.budgets import Preference, Total
from kvir.policy_ir.rules import Region, Rule
from kvir.policy_ir.terms import All, Recent, Sink, Term, TopK, TopP

Unit = tuple[int, int]  # (layer, head)


@dataclass(frozen=True)
class LayerState:
    """One layer that the rule governs, its inputs (candidates are filled in) and the governed heads."""

    inputs: ScoreInputs
    heads: tuple[int, ...]


def select_rule(rule: Rule, layers: Sequence[LayerState], prompt: int) -> dict[Unit, Tensor]:
    """Rows that stay in each governed unit: int64 [kept], ascending.

    The sequence has n = rows of the inputs; the first `prompt` rows are its prompt.
    """
    n = layers[0].inputs.k.shape[0]
    start, stop = candidate_rows(rule.keep, rule.region, n, prompt)
    layers = [replace(layer, inputs=replace(layer.inputs, candidates=(start, stop))) for layer in layers]
    units = [(layer.inputs.layer, head) for layer in layers for head in layer.heads]
    kept = {unit: torch.ones(n, dtype=torch.bool) for unit in units}
    if any(isinstance(term, All) for term in rule.keep):
        return {unit: mask.nonzero()[:, 0] for unit, mask in kept.items()}
    for mask in kept.values():
        mask[start:stop] = False
    for term in rule.keep:
        match term:
            case All() | Sink() | Recent():
                continue
            case TopK():
                lengths = Lengths(n, prompt, inside_rows(term, rule.keep), stop - start)
                chosen = _top_k(term, layers, lengths)
            case TopP():
                chosen = _top_p(term, layers)
            case _:
                assert_never(term)
        for unit, rows in chosen.items():
            kept[unit][rows] = True
    return {unit: mask.nonzero()[:, 0] for unit, mask in kept.items()}


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


def _top_k(term: TopK, layers: Sequence[LayerState], lengths: Lengths) -> dict[Unit, Tensor]:
    budgets = _budgets(term, layers, lengths)
    chosen: dict[Unit, Tensor] = {}
    offers: dict[Unit, UnitScores] = {}
    for layer in layers:
        of_layer = [budgets[layer.inputs.layer, head] for head in layer.heads]
        known = [max(0, min(b, lengths.candidates)) for b in of_layer if b is not None]
        # a score that depends on the budget is given the mean of its layer
        mean = sum(known) // len(known) if known else lengths.candidates
        inputs = replace(layer.inputs, inside_rows=lengths.inside, budget_rows=mean)
        scores = score(term.by, inputs, term.precision)
        for head, budget in zip(layer.heads, of_layer, strict=True):
            unit = (inputs.layer, head)
            if budget is None:  # `full` in a table: it keeps all, and competes with nobody
                chosen[unit] = torch.arange(inputs.k.shape[0])
            else:
                offers[unit] = UnitScores(*unit, scores[head], inputs.candidates, inputs.positions)
    if term.scope == "head":
        for tied in _split(offers, term.tie):
            # equal budgets make equal choices; in a table they may differ among tied units
            for unit in tied:
                own = group_take(term, lengths, [budgets[unit] or 0], 1)
                take = replace(own, rows=own.rows * len(tied))
                chosen[unit] = _taken(term, {u: offers[u] for u in tied}, take)[unit]
        return chosen
    for rivals in _split(offers, term.scope):
        take = group_take(term, lengths, [budgets[unit] or 0 for unit in rivals], len(rivals))
        chosen |= _taken(term, {unit: offers[unit] for unit in rivals}, take)
    return chosen


def _taken(term: TopK, offers: Mapping[Unit, UnitScores], take: Take) -> dict[Unit, Tensor]:
    index = {unit: i for i, unit in enumerate(offers)}
    ties = [[index[unit] for unit in tied] for tied in _split(offers, term.tie)] if term.tie else []
    rows = select_top_k(
        list(offers.values()),
        take,
        ties=ties,
        tie_reduce=term.tie_reduce,
        block=term.block,
        on_equal=term.on_equal,
    )
    return dict(zip(offers, rows, strict=True))


def _budgets(term: TopK, layers: Sequence[LayerState], lengths: Lengths) -> dict[Unit, int | None]:
    """Rows that each unit may choose on average; None keeps all."""
    units = [(layer.inputs.layer, head) for layer in layers for head in layer.heads]
    match term.budget:
        case Total(tokens=tokens):
            rivals = {"head": 1, "layer": len(layers[0].heads), "model": len(units)}[term.scope]
            return dict.fromkeys(units, max(0, tokens // rivals - lengths.inside))
        case Preference(mean=mean):
            preferences = [layer_preference(term.budget, layer.inputs) for layer in layers]
            rows = share_out(preferences, max(0, mean - lengths.inside), lengths.candidates)
            of_layer = {layer.inputs.layer: r for layer, r in zip(layers, rows, strict=True)}
            return {unit: of_layer[unit[0]] for unit in units}
        case _:
            pass
    ramp = {layer.inputs.layer: (i, len(layers)) for i, layer in enumerate(layers)}
    return {unit: unit_budget(term, lengths, unit, ramp[unit[0]]) for unit in units}


def _top_p(term: TopP, layers: Sequence[LayerState]) -> dict[Unit, Tensor]:
    chosen: dict[Unit, Tensor] = {}
    for layer in layers:
        inputs, of = layer.inputs, term.by if term.of is None else term.of
        start, stop = inputs.candidates
        scores = score(term.by, inputs, term.precision)[:, start:stop]
        masses = score(of, inputs, term.precision)[:, start:stop]
        per_query = None
        if term.rows == "union" and start < stop:
            per_query = tuple(score_per_query(s, inputs, term.precision) for s in (term.by, of))
        for head in layer.heads:
            rows = select_top_p(
                scores[head],
                masses[head],
                term.mass,
                floor=term.floor,
                cap=term.cap,
                on_equal=term.on_equal,
                per_query=None if per_query is None else (per_query[0][head], per_query[1][head]),
            )
            chosen[inputs.layer, head] = start + rows
    return chosen


def _split(units: Mapping[Unit, object] | Sequence[Unit], scope: str | None) -> list[list[Unit]]:
    """Units by scope: each by itself, those of a layer together, or all."""
    key = {None: lambda u: u, "head": lambda u: u, "layer": lambda u: u[0], "model": lambda u: 0}[scope]
    groups: dict[object, list[Unit]] = {}
    for unit in units:
        groups.setdefault(key(unit), []).append(unit)
    return list(groups.values())
