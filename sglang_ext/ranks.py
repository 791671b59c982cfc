"""Tensor-parallel ranks: whose KV heads are whose, and what ranks must tell each other.

Every rank schedules alike, so every rank keeps the books of all of them: which logical page has which
head-pages on which rank.  A head-page id is one of its rank's pool.  Room is made, requests are admitted and
prefixes are matched on every rank at once, from equal books, without a message.  Only how many rows a
selection left is not known beforehand where scores decide: ranks select for their own heads and then tell
each other (`Exchange`).

A *lane* is a layer of a rank, and one more lane of each rank stands for any of its layers: lane = rank *
(layers + 1) + layer.  Head-pages are counted by lane.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvir.lowering.stages import ExecutionPlan, LayoutPlan
from kvir.lowering.tensor_parallel import rank_heads
from kvir.policy_ir.budgets import Preference
from kvir.policy_ir.nodes import Rule, TopK

if TYPE_CHECKING:
    import torch

    from kvir.sglang_ext.compact import Compact

Placed = list[tuple[int, NDArray[np.int64]]]  # (unit, positions of its rows), in the order of placing


@dataclass(frozen=True)
class Ranks:
    """`rank` is this one of `count`."""

    count: int = 1
    rank: int = 0

    def heads(self, kv_heads: int, rank: int | None = None) -> range:
        """KV heads of a layer that a rank has; this one by default."""
        return rank_heads(kv_heads, self.count, self.rank if rank is None else rank)

    def rank_of_unit(self, layout: LayoutPlan) -> NDArray[np.int64]:
        """[U]"""
        of_head = np.zeros(layout.kv_heads, np.int64)
        for rank in range(self.count):
            of_head[list(self.heads(layout.kv_heads, rank))] = rank
        return np.tile(of_head, layout.unit_count // layout.kv_heads)

    def lane_count(self, layout: LayoutPlan) -> int:
        return self.count * (layout.unit_count // layout.kv_heads + 1)

    def lane_of_unit(self, layout: LayoutPlan) -> NDArray[np.int64]:
        """[U]"""
        layers = layout.unit_count // layout.kv_heads
        layer_of_unit = np.arange(layout.unit_count) // layout.kv_heads
        return self.rank_of_unit(layout) * (layers + 1) + layer_of_unit


ALONE = Ranks()


class Exchange:
    """What the ranks of a group tell each other, through memory of the host."""

    def __init__(self, group: torch.distributed.ProcessGroup, ranks: Ranks) -> None:
        self._group, self._ranks = group, ranks

    @staticmethod
    def of(ranks: Ranks) -> Exchange | None:
        """With the other ranks of SGLang's tensor-parallel group, if there are any."""
        if ranks.count == 1:
            return None
        from sglang.srt.distributed.parallel_state import get_tp_group

        return Exchange(get_tp_group().cpu_group, ranks)

    def complete(self, compact: Compact) -> None:
        """This rank's heads have their rows: the others learn how many, and the books get theirs."""
        import torch.distributed

        found: list[Any] = [None] * self._ranks.count
        torch.distributed.all_gather_object(found, compact.placed, group=self._group)
        for rank, placed in enumerate(found):
            if rank != self._ranks.rank:
                for unit, positions in placed:
                    compact.place(unit, positions)


def cannot_be_split(plan: ExecutionPlan, count: int) -> list[str]:
    """Why the heads of a plan cannot be spread over that many ranks, in words; empty if they can."""
    if count == 1:
        return []
    layout = plan.layout
    if layout.kv_heads % count or layout.query_heads % count:
        heads = f"{layout.query_heads} query heads and {layout.kv_heads} KV heads"
        return [f"{heads} do not divide over {count} ranks"]
    rules = {
        selection.rule
        for c in layout.compact
        for selection in (c.prefill.selection, c.decode.selection)
        if selection is not None and _across_heads(plan.policy.rules[selection.rule])
    }
    return [
        f"in rules[{number}] heads compete for rows or keep the same ones, and a rank selects for its own"
        for number in sorted(rules)
    ]


def _across_heads(rule: Rule) -> bool:
    """Whether what a head keeps depends on other heads."""
    return any(
        isinstance(term, TopK)
        and (term.scope != "head" or term.tie is not None or isinstance(term.budget, Preference))
        for term in rule.keep
    )
