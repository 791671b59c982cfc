"""Selection by mass (`top_p`): as many rows as hold a share of a distribution, ranked by any score."""

from __future__ import annotations

import torch
from torch import Tensor

from kvir.kernels.ref.select import OnEqual, ranking


def nucleus(distribution: Tensor, mass: float) -> Tensor:
    """The least number of largest entries that hold `mass` of the sum: [..., C] -> int64 [...].

    Entries need not sum to 1; an all-zero distribution needs none.  Raises ValueError for negative or
    infinite entries, which are no distribution.
    """
    if not torch.isfinite(distribution).all() or (distribution < 0).any():
        raise ValueError("`top_p` counts the mass of a distribution: scores must be finite and not negative")
    held = distribution.double().sort(dim=-1, descending=True).values.cumsum(dim=-1)
    total = held[..., -1:]
    counts = (held < mass * total).sum(dim=-1) + 1
    return torch.where(total[..., 0] > 0, counts, 0)


def select_top_p(
    scores: Tensor,
    distribution: Tensor,
    mass: float,
    *,
    floor: int = 0,
    cap: int | None = None,
    on_equal: OnEqual = "older",
    per_query: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Candidates of one unit that stay, counted from its first candidate: int64 [kept], ascending.

    scores, distribution: float32 [C].  The best K by `scores` stay, K the nucleus of `distribution`.  With
    `per_query` = (scores, distributions), float32 [W, C] each, it is the union over queries of the best K_q
    by the query's scores.  If that is fewer than `floor`, the best others by `scores` join; if more than
    `cap`, the worst by `scores` go.
    """
    candidates = scores.shape[0]
    order = ranking(scores, on_equal)
    place = torch.empty_like(order)
    place[order] = torch.arange(candidates, device=order.device)
    chosen = torch.zeros(candidates, dtype=torch.bool, device=order.device)
    if candidates == 0:
        return chosen.nonzero()[:, 0]
    if per_query is None:
        chosen[order[: int(nucleus(distribution, mass))]] = True
    else:
        for ranked, count in zip(per_query[0], nucleus(per_query[1], mass).tolist(), strict=True):
            chosen[ranking(ranked, on_equal)[:count]] = True
    # first the chosen, then the others, each from the best score down
    by_choice = (place + torch.where(chosen, 0, candidates)).argsort()
    count = max(int(chosen.sum()), min(floor, candidates))
    count = count if cap is None else min(count, cap)
    return by_choice[:count].sort().values
