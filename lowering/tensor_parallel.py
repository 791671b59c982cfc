"""What one rank of a tensor-parallel server holds: its KV heads of every layer.

SGLang gives rank r of N the KV heads [r * H / N, (r + 1) * H / N) or, with more ranks than heads, one head
each: N / H ranks hold the same one.  Ranks share the logical tokens, so the fullest one sets the limit.
"""

from __future__ import annotations

from typing import TypeVar

from msgspec.structs import replace

from kvir.lowering.stages import CompactClass, LayoutPlan, ResidencyClass

C = TypeVar("C", CompactClass, ResidencyClass)


def rank_heads(kv_heads: int, rank_count: int, rank: int) -> range:
    """The KV heads of a rank.  Raises ValueError if they cannot be divided."""
    if not 0 <= rank < rank_count:
        raise ValueError(f"there is no rank {rank} of {rank_count}")
    if kv_heads % rank_count == 0:
        share = kv_heads // rank_count
        return range(rank * share, (rank + 1) * share)
    if rank_count % kv_heads == 0:
        head = rank // (rank_count // kv_heads)
        return range(head, head + 1)
    raise ValueError(f"{kv_heads} KV heads do not divide over {rank_count} ranks")


def rank_layout(layout: LayoutPlan, rank_count: int, rank: int) -> LayoutPlan:
    """The layout of one rank, for its figures.  The stages inside it are the whole model's.

    Raises ValueError if heads do not divide over the ranks.
    """
    heads = rank_heads(layout.kv_heads, rank_count, rank)
    if layout.query_heads % rank_count:
        raise ValueError(f"{layout.query_heads} query heads do not divide over {rank_count} ranks")

    def own(c: C) -> C:
        split = (divmod(unit, layout.kv_heads) for unit in c.units)
        return replace(c, units=tuple(i * len(heads) + h - heads.start for i, h in split if h in heads))

    layers = layout.unit_count // layout.kv_heads
    unit_count = layers * len(heads)
    return replace(
        layout,
        kv_heads=len(heads),
        query_heads=layout.query_heads // rank_count,
        unit_count=unit_count,
        classes=tuple(c for c in map(own, layout.classes) if c.units),
        compact=tuple(c for c in map(own, layout.compact) if c.units),
        table_bytes_per_page=layout.table_bytes_per_page * unit_count // layout.unit_count,
    )


def rank_layouts(layout: LayoutPlan, rank_count: int) -> list[LayoutPlan]:
    """The layout of each rank.  Raises ValueError as `rank_layout` does."""
    return [rank_layout(layout, rank_count, rank) for rank in range(rank_count)]
