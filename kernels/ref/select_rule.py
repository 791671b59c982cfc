"""A whole rule of a policy applied to one sequence: which rows of which units stay.

This is what a selection means, from the language's terms to rows: the oracle of tests, and of any faster
implementation.  All units hold the same n rows; nothing is evicted here.

It goes in two steps, since rivals of several layers are never in memory together while a server computes:
each layer makes an `Offer` when its keys are known, and `choose` decides when all rivals have offered.
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
from kvir.policy_ir.scores import CriticalKV
from kvir.policy_ir.terms import All, Recent, Sink, Term, TopK, TopP

Unit = tuple[int, int]  # (layer, head)
Governed = Mapping[int, tuple[int, ...]]  # layer -> its heads that a rule governs, in order


@dataclass(frozen=True)
class LayerState:
    """One layer that the rule governs, its inputs (candidates are filled in) and the governed heads."""

    inputs: ScoreInputs
    heads: tuple[int, ...]


@dataclass(frozen=True)
class TermOffer:
    """What one term of the rule knows of one layer."""

    scores: Tensor | None = None  # float32 [Hkv, n] of a `top_k`
    preference: float = 0.0  # of a budget by preference
    chosen: Mapping[int, Tensor] | None = None  # head -> rows of a `top_p`, which knows no rivals


@dataclass(frozen=True)
class Offer:
    """What one layer puts up for a selection; small beside its K and V."""

    layer: int
    heads: tuple[int, ...]
    rows: int  # n
    candidates: tuple[int, int]
    positions: Tensor | None
    terms: tuple[TermOffer, ...]  # one per term of the rule


def select_rule(rule: Rule, layers: Sequence[LayerState], prompt: int) -> dict[Unit, Tensor]:
    """Rows that stay in each governed unit: int64 [kept], ascending.

    The sequence has n = rows of the inputs; the first `prompt` rows are its prompt.
    """
    governed = {layer.inputs.layer: layer.heads for layer in layers}
    return choose(rule, [offer(rule, layer, governed, prompt) for layer in layers], governed, prompt)


def spans_layers(rule: Rule) -> bool:
    """Whether some unit's rows depend on other layers, so that `choose` must wait for all of them."""
    return any(
        isinstance(term, TopK) and ("model" in (term.scope, term.tie) or isinstance(term.budget, Preference))
        for term in rule.keep
    )


def offer(rule: Rule, layer: LayerState, governed: Governed, prompt: int) -> Offer:
    """What one of the `governed` layers puts up.  Arguments as in `select_rule`."""
    n = layer.inputs.k.shape[0]
    candidates = candidate_rows(rule.keep, rule.region, n, prompt)
    inputs = replace(layer.inputs, candidates=candidates)
    terms: list[TermOffer] = []
    for term in rule.keep:
        match term:
            case All() | Sink() | Recent():
                terms.append(TermOffer())
            case TopK():
                lengths = Lengths(n, prompt, inside_rows(term, rule.keep), candidates[1] - candidates[0])
                terms.append(_scored(term, replace(layer, inputs=inputs), governed, lengths))
            case TopP():
                terms.append(TermOffer(chosen=_top_p(term, inputs, layer.heads)))
            case _:
                assert_never(term)
    return Offer(inputs.layer, layer.heads, n, candidates, inputs.positions, tuple(terms))


def choose(rule: Rule, offers: Sequence[Offer], governed: Governed, prompt: int) -> dict[Unit, Tensor]:
    """Rows that stay in each unit of the layers that offered: all governed ones if the rule spans them."""
    n, (start, stop) = offers[0].rows, offers[0].candidates
    units = [(each.layer, head) for each in offers for head in each.heads]
    kept = {unit: torch.ones(n, dtype=torch.bool) for unit in units}
    if any(isinstance(term, All) for term in rule.keep):
        return {unit: mask.nonzero()[:, 0] for unit, mask in kept.items()}
    for mask in kept.values():
        mask[start:stop] = False
    for i, term in enumerate(rule.keep):
        match term:
            case All() | Sink() | Recent():
                continue
            case TopK():
                lengths = Lengths(n, prompt, inside_rows(term, rule.keep), stop - start)
                chosen = _top_k(term, offers, i, governed, lengths)
            case TopP():
                chosen = {
                    (each.layer, head): start + rows
                    for each in offers
                    for head, rows in (each.terms[i].chosen or {}).items()
                }
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


def _scored(term: TopK, layer: LayerState, governed: Governed, lengths: Lengths) -> TermOffer:
    inputs = replace(layer.inputs, inside_rows=lengths.inside, budget_rows=lengths.candidates)
    if isinstance(term.budget, Preference):
        if isinstance(term.by, CriticalKV):
            raise ValueError("criticalkv needs its budget before it scores; `preference` knows it after")
        scores = score(term.by, inputs, term.precision)
        return TermOffer(scores=scores, preference=layer_preference(term.budget, inputs))
    budgets = [_own_budget(term, (inputs.layer, head), governed, lengths) for head in layer.heads]
    known = [max(0, min(b, lengths.candidates)) for b in budgets if b is not None]
    # a score that depends on the budget is given the mean of its layer
    mean = sum(known) // len(known) if known else lengths.candidates
    return TermOffer(scores=score(term.by, replace(inputs, budget_rows=mean), term.precision))


def _top_k(
    term: TopK, layers: Sequence[Offer], index: int, governed: Governed, lengths: Lengths
) -> dict[Unit, Tensor]:
    budgets = _budgets(term, layers, index, governed, lengths)
    chosen: dict[Unit, Tensor] = {}
    offers: dict[Unit, UnitScores] = {}
    for layer in layers:
        scores = layer.terms[index].scores
        assert scores is not None
        for head in layer.heads:
            unit = (layer.layer, head)
            if budgets[unit] is None:  # `full` in a table: it keeps all, and competes with nobody
                chosen[unit] = torch.arange(layer.rows)
            else:
                offers[unit] = UnitScores(*unit, scores[head], layer.candidates, layer.positions)
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


def _budgets(
    term: TopK, layers: Sequence[Offer], index: int, governed: Governed, lengths: Lengths
) -> dict[Unit, int | None]:
    """Rows that each unit may choose on average; None keeps all."""
    units = [(layer.layer, head) for layer in layers for head in layer.heads]
    if not isinstance(term.budget, Preference):
        return {unit: _own_budget(term, unit, governed, lengths) for unit in units}
    mean = max(0, term.budget.mean - lengths.inside)
    rows = share_out([layer.terms[index].preference for layer in layers], mean, lengths.candidates)
    of_layer = {layer.layer: r for layer, r in zip(layers, rows, strict=True)}
    return {unit: of_layer[unit[0]] for unit in units}


def _own_budget(term: TopK, unit: Unit, governed: Governed, lengths: Lengths) -> int | None:
    """Rows that a unit may choose on average, if that is known without scores; None keeps all."""
    match term.budget:
        case Total(tokens=tokens):
            everywhere = sum(len(heads) for heads in governed.values())
            rivals = {"head": 1, "layer": len(governed[unit[0]]), "model": everywhere}[term.scope]
            return max(0, tokens // rivals - lengths.inside)
        case _:
            ramp = list(governed).index(unit[0]), len(governed)
            return unit_budget(term, lengths, unit, ramp)


def _top_p(term: TopP, inputs: ScoreInputs, heads: Sequence[int]) -> dict[int, Tensor]:
    """Candidates, counted from the first one, that the term keeps in each head."""
    chosen: dict[int, Tensor] = {}
    of = term.by if term.of is None else term.of
    start, stop = inputs.candidates
    scores = score(term.by, inputs, term.precision)[:, start:stop]
    masses = score(of, inputs, term.precision)[:, start:stop]
    per_query = None
    if term.rows == "union" and start < stop:
        per_query = tuple(score_per_query(s, inputs, term.precision) for s in (term.by, of))
    for head in heads:
        chosen[head] = select_top_p(
            scores[head],
            masses[head],
            term.mass,
            floor=term.floor,
            cap=term.cap,
            on_equal=term.on_equal,
            per_query=None if per_query is None else (per_query[0][head], per_query[1][head]),
        )
    return chosen


def _split(units: Mapping[Unit, object] | Sequence[Unit], scope: str | None) -> list[list[Unit]]:
    """Units by scope: each by itself, those of a layer together, or all."""
    key = {None: lambda u: u, "head": lambda u: u, "layer": lambda u: u[0], "model": lambda u: 0}[scope]
    groups: dict[object, list[Unit]] = {}
    for unit in units:
        groups.setdefault(key(unit), []).append(unit)
    return list(groups.values())
