"""The accounting of head-pages, recounted from scratch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kvir.sglang_ext.allocator import KvirAllocator


def violations(allocator: KvirAllocator) -> list[str]:
    """Every invariant of the residency, recounted from scratch; empty when healthy."""
    res = allocator.residency
    found = res.pool.violations()
    ranks, units = res.geometry.ranks.count, res.geometry.class_ranks
    resident = res.alive.sum(0) @ units  # these are [R]
    idle = (res.alive & (res.cover == 0)).sum(0) @ units
    copies = [state.compact for state in res.requests.values() if state.compact is not None]
    compact = sum((copy.head_pages_by_rank for copy in copies), np.zeros(ranks, np.int64))
    if compact.sum() != res.compacts.head_pages:
        found.append(f"compact head-pages: counted {compact}, kept {res.compacts.head_pages}")
    if (resident + compact != res.pool.resident).any():
        found.append(f"alive {resident} + compact {compact} head-pages, the pool says {res.pool.resident}")
    if (idle != res.idle_head_pages).any():
        found.append(f"idle head-pages: counted {idle}, kept {res.idle_head_pages}")
    for rank in range(ranks):
        mine = res.table[:, res.geometry.rank_of_unit == rank]
        listed = mine[mine >= 0]
        if len(listed) != resident[rank] or len(np.unique(listed)) != resident[rank]:
            found.append("the residency table disagrees with the alive cells")
    if (res.cover > 0)[~res.alive].any():
        found.append("a covered cell is absent")
    if not res.requests and res.cover.any():
        found.append("cells are covered, but no request runs")
    return found
