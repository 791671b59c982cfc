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
    size = res.geometry.class_size
    resident = int(res.alive.sum(0) @ size)
    idle = int((res.alive & (res.cover == 0)).sum(0) @ size)
    compact = sum(state.compact.head_pages for state in res.requests.values() if state.compact is not None)
    if compact != res.compacts.head_pages:
        found.append(f"compact head-pages: counted {compact}, kept {res.compacts.head_pages}")
    if resident + compact != res.pool.resident:
        found.append(f"alive {resident} + compact {compact} head-pages, the pool says {res.pool.resident}")
    if idle != res.idle_head_pages:
        found.append(f"idle head-pages: counted {idle}, kept {res.idle_head_pages}")
    listed = res.table[res.table >= 0]
    if len(listed) != resident or len(np.unique(listed)) != resident:
        found.append("the residency table disagrees with the alive cells")
    if (res.cover > 0)[~res.alive].any():
        found.append("a covered cell is absent")
    if not res.requests and res.cover.any():
        found.append("cells are covered, but no request runs")
    return found
