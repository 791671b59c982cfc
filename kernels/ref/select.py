"""Reference of `SelectTopK`: rivals offer blocks of rows, and the best blocks win until the rows are gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor
from typing import Literal

import torch
from torch import Tensor

from kvir.kernels.ref.score_attention import reduce
from kvir.kernels.score_ops import Take, UnitScores
from kvir.policy_ir.scores import Reduce

OnEqual = Literal["older", "newer"]


@dataclass(frozen=True)
class _Offer:
    """Blocks that units with the same rows offer together, in the order of positions."""

    members: tuple[int, ...]  # units
    scores: Tensor  # float32 [blocks], mean over the rows of the block
    ages: Tensor  # int64 [blocks], position of the first row
    first: Tensor  # int64 [blocks], first row
    sizes: Tensor  # int64 [blocks], rows


def select_top_k(
    units: Sequence[UnitScores],
    take: Take,
    *,
    ties: Sequence[Sequence[int]] = (),
    tie_reduce: Reduce = "mean",
    block: int = 1,
    on_equal: OnEqual = "older",
) -> list[Tensor]:
    """Candidates that stay, per unit: int64 [kept], ascending.  See `SelectTopK`."""
    tied = {unit for tie in ties for unit in tie}
    groups = [*(tuple(tie) for tie in ties), *((u,) for u in range(len(units)) if u not in tied)]
    offers = [_offer(units, members, tie_reduce, block) for members in groups]
    won = _compete(units, offers, take, on_equal)
    if take.blend is not None:
        won = [
            _compete(units, [offer], Take(rows=_blended(take.blend, blocks, offer)), on_equal)[0]
            for blocks, offer in zip(won, offers, strict=True)
        ]
    kept: list[Tensor] = [offers[0].first[:0]] * len(units)
    for offer, blocks in zip(offers, won, strict=True):
        sizes = offer.sizes[blocks]
        inside = torch.arange(int(sizes.sum()), device=sizes.device) - (
            sizes.cumsum(0) - sizes
        ).repeat_interleave(sizes)
        for unit in offer.members:
            kept[unit] = offer.first[blocks].repeat_interleave(sizes) + inside
    return kept


def ranking(scores: Tensor, on_equal: OnEqual) -> Tensor:
    """Indices from the largest score down; among equals the first or the last comes first."""
    if on_equal == "older":
        return scores.argsort(descending=True, stable=True)
    return (scores.shape[0] - 1) - scores.flip(0).argsort(descending=True, stable=True)


def _offer(units: Sequence[UnitScores], members: tuple[int, ...], tie_reduce: Reduce, block: int) -> _Offer:
    first = units[members[0]]
    start, stop = first.candidates
    if any(units[u].candidates != first.candidates for u in members):
        raise ValueError("units that keep the same rows must have the same candidates")
    scores = torch.stack([units[u].scores[start:stop].float() for u in members])
    if torch.isnan(scores).any():
        raise ValueError(f"a score of layer {first.layer} is not a number")
    common = reduce(scores, tie_reduce, dim=0)
    rows = torch.arange(start, stop, device=common.device)
    positions = rows if first.positions is None else first.positions[start:stop]
    _, sizes = torch.unique_consecutive(positions // block, return_counts=True)
    begins = sizes.cumsum(0) - sizes
    block_of = torch.arange(len(sizes), device=common.device).repeat_interleave(sizes)
    total = torch.zeros(len(sizes), device=common.device).index_add(0, block_of, common)
    return _Offer(members, total / sizes, positions[begins], rows[begins], sizes)


def _compete(
    units: Sequence[UnitScores], offers: Sequence[_Offer], take: Take, on_equal: OnEqual
) -> list[Tensor]:
    """Which blocks of each offer win: ascending indices."""
    # Every block of every offer is one entry; the order of entries is that of the tie rule.
    scores, ages, safe, weights, offer_of, block_of = [], [], [], [], [], []
    for number, offer in enumerate(offers):
        order = ranking(offer.scores, on_equal)
        reached = torch.empty_like(offer.sizes)
        reached[order] = offer.sizes[order].cumsum(0)  # rows if it takes this block and all better
        cap = reached.new_tensor(2**62 if take.cap_rows is None else take.cap_rows)
        allowed = (reached <= cap).nonzero()[:, 0]
        scores.append(offer.scores[allowed])
        ages.append(offer.ages[allowed])
        safe.append(reached[allowed] <= take.safe_rows)
        weights.append(offer.sizes[allowed] * len(offer.members))
        offer_of.append(torch.full_like(allowed, number))
        block_of.append(allowed)
    places = sorted(range(len(offers)), key=lambda i: _place(units, offers[i]))
    owner, chosen = torch.cat(offer_of), torch.cat(block_of)
    # places holds an offer for each place: its inverse a place for each offer
    place_of = torch.tensor(places, device=owner.device).argsort()
    order = place_of[owner].argsort(stable=True)
    # stable sorts from the least key to the most: layer and head, age, score, safe
    order = order[torch.cat(ages)[order].argsort(descending=on_equal == "newer", stable=True)]
    order = order[torch.cat(scores)[order].argsort(descending=True, stable=True)]
    order = order[torch.cat(safe)[order].int().argsort(descending=True, stable=True)]
    winners = order[torch.cat(weights)[order].cumsum(0) <= take.rows]
    return [chosen[winners[owner[winners] == number]].sort().values for number in range(len(offers))]


def _place(units: Sequence[UnitScores], offer: _Offer) -> tuple[int, int]:
    return min((units[u].layer, units[u].head) for u in offer.members)


def _blended(blend: tuple[float, Fraction], blocks: Tensor, offer: _Offer) -> int:
    """Rows of all members together, from what each won and its equal share, in exact decimal arithmetic."""
    share, equal = Fraction(repr(blend[0])), blend[1]
    won = int(offer.sizes[blocks].sum())
    return len(offer.members) * floor((1 - share) * won + share * equal + Fraction(1, 2))
