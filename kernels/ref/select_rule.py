"""A whole rule of a policy applied to one sequence: which rows of which units stay.

This is what a selection means, from the language's terms to rows: the oracle of tests, and of any faster
implementation.  Units may hold different rows, if selections before this one have left them so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import assert_never

import torch
from torch import Tensor

from kvir.kernels.ref.select import select_top_k
from kvir.kernels.ref.select_budget import Lengths, group_take
from kvir.kernels.ref.select_offer import (
    Governed,
    LayerState,
    Offer,
    Unit,
    UnitOffer,
    candidate_count,
    inside_rows,
    offer,
    own_budget,
)
from kvir.kernels.ref.select_preference import share_out
from kvir.kernels.score_ops import Take, UnitScores
from kvir.policy_ir.budgets import Preference
from kvir.policy_ir.rules import Rule
from kvir.policy_ir.terms import All, Recent, Sink, TopK, TopP


def select_rule(rule: Rule, layers: Sequence[LayerState], prompt: int) -> dict[Unit, Tensor]:
    """Rows that stay in each governed unit: int64 [kept], ascending.

    The sequence has n = rows of the inputs; the first `prompt` rows are its prompt.
    """
    governed = {layer.inputs.layer: layer.heads for layer in layers}
    length = layers[0].inputs.k.shape[0]
    offers = [offer(rule, [layer], governed, prompt, length) for layer in layers]
    return choose(rule, offers, governed, prompt)


def spans_layers(rule: Rule) -> bool:
    """Whether some unit's rows depend on other layers, so that `choose` must wait for all of them."""
    return any(
        isinstance(term, TopK) and ("model" in (term.scope, term.tie) or isinstance(term.budget, Preference))
        for term in rule.keep
    )


def choose(rule: Rule, offers: Sequence[Offer], governed: Governed, prompt: int) -> dict[Unit, Tensor]:
    """Rows that stay in each unit of the layers that offered: all governed ones if the rule spans them.

    Rows are counted among those that the unit holds: int64 [kept], ascending.
    """
    units = {(each.layer, head): unit for each in offers for head, unit in each.units.items()}
    kept = {name: torch.ones(unit.rows, dtype=torch.bool, device=unit.device) for name, unit in units.items()}
    if any(isinstance(term, All) for term in rule.keep):
        return {name: mask.nonzero()[:, 0] for name, mask in kept.items()}
    for name, mask in kept.items():
        mask[slice(*units[name].candidates)] = False
    for i, term in enumerate(rule.keep):
        match term:
            case All() | Sink() | Recent():
                continue
            case TopK():
                inside = inside_rows(term, rule.keep)
                chosen = _top_k(term, offers, units, i, governed, prompt, inside)
            case TopP():
                chosen = {name: rows for name, unit in units.items() if (rows := unit.terms[i]) is not None}
            case _:
                assert_never(term)
        for name, rows in chosen.items():
            kept[name][rows] = True
    return {name: mask.nonzero()[:, 0] for name, mask in kept.items()}


def _top_k(
    term: TopK,
    layers: Sequence[Offer],
    units: Mapping[Unit, UnitOffer],
    index: int,
    governed: Governed,
    prompt: int,
    inside: int,
) -> dict[Unit, Tensor]:
    counts = {unit: candidate_count(offered.candidates) for unit, offered in units.items()}
    lengths = Lengths(layers[0].length, prompt, inside, max(counts.values()))
    budgets = _budgets(term, layers, units, index, governed, lengths)
    chosen: dict[Unit, Tensor] = {}
    offers: dict[Unit, UnitScores] = {}
    for unit, offered in units.items():
        scores = offered.terms[index]
        assert scores is not None
        if budgets[unit] is None:  # `full` in a table: it keeps all, and competes with nobody
            chosen[unit] = torch.arange(offered.rows, device=offered.device)
        else:
            offers[unit] = UnitScores(*unit, scores, offered.candidates, offered.positions)
    if term.scope == "head":
        for tied in _split(offers, term.tie):
            # equal budgets make equal choices; in a table they may differ among tied units
            for unit in tied:
                own = replace(lengths, candidates=counts[unit])
                take = group_take(term, own, [budgets[unit] or 0], 1, counts[unit])
                take = replace(take, rows=take.rows * len(tied))
                chosen[unit] = _taken(term, {u: offers[u] for u in tied}, take)[unit]
        return chosen
    for rivals in _split(offers, term.scope):
        available = sum(counts[unit] for unit in rivals)
        take = group_take(term, lengths, [budgets[unit] or 0 for unit in rivals], len(rivals), available)
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
    term: TopK,
    layers: Sequence[Offer],
    units: Mapping[Unit, UnitOffer],
    index: int,
    governed: Governed,
    lengths: Lengths,
) -> dict[Unit, int | None]:
    """Rows that each unit may choose on average; None keeps all."""
    if not isinstance(term.budget, Preference):
        return {unit: own_budget(term, unit, governed, lengths) for unit in units}
    mean = max(0, term.budget.mean - lengths.inside)
    rows = share_out([layer.preferences[index] for layer in layers], mean, lengths.candidates)
    of_layer = {layer.layer: r for layer, r in zip(layers, rows, strict=True)}
    return {unit: of_layer[unit[0]] for unit in units}


def _split(units: Mapping[Unit, object] | Sequence[Unit], scope: str | None) -> list[list[Unit]]:
    """Units by scope: each by itself, those of a layer together, or all."""
    key = {None: lambda u: u, "head": lambda u: u, "layer": lambda u: u[0], "model": lambda u: 0}[scope]
    groups: dict[object, list[Unit]] = {}
    for unit in units:
        groups.setdefault(key(unit), []).append(unit)
    return list(groups.values())
