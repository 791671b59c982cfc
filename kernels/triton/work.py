"""The work list of decode: visible rows cut into items of equal cost, long ones first, planned on the device.

Rows of heads are ragged: a few heads may hold a hundred times the rows of the others.  Each (request, KV
head), here a *lane*, is cut into items of `chunk` rows and one shorter item.  `chunk` comes from the sum of
all lanes over the blocks that run at once, so that no lane outlasts the others (a little longer where that
saves a second round of blocks), and lies in memory, so that a captured graph follows the lengths.  Blocks
start in order: full items come first, then the shorter ones by falling length, to within a sixteenth of a
chunk.

The grid is fixed: at most `slots` full items and one short item per lane; programs without an item end at
once.  All layers are planned in one launch each of the two kernels, since lengths are the same for all layers
and only bounds differ.
"""

# Triton's ranges and blocks exist for its compiler alone.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvir.kernels.ops import Bounds
from kvir.kernels.triton.rows import visible_rows
from kvir.kernels.triton.settings import kernel, padded

SIZE_CLASSES = tl.constexpr(16)
STRETCHES = tl.constexpr(4)
META = tl.constexpr(4)  # int32 per layer: rows of a full item, items, full items, nothing
ITEMS_PER_PROGRAM = 256
MIN_CHUNK_ROWS = 128  # shorter items cost more to merge than they save


@dataclass(frozen=True)
class WorkList:
    """Of each layer: items in the order in which they start, and where each lane's items are.

    M items at most, R lanes.  Item i is the visible rows [item_start, item_start + chunk) of a lane.  The
    full items of lane r are `first_full[r]` and those after it; its short item is `short_item[r]`, if its
    rows are no multiple of the chunk.
    """

    item_lane: Tensor  # int32 [layers, M]
    item_start: Tensor  # int32 [layers, M]
    first_full: Tensor  # int32 [layers, R]
    short_item: Tensor  # int32 [layers, R]
    meta: Tensor  # int32 [layers, 4]: rows of a full item, number of items, of full items, nothing
    slots: int  # blocks that run at once
    unit0: int  # unit of the first layer's first KV head

    @property
    def max_items(self) -> int:
        return self.item_lane.shape[1]


def empty_work(layers: int, lanes: int, slots: int, device: torch.device | str, unit0: int = 0) -> WorkList:
    """Memory for the work lists of `layers` layers of up to `lanes` lanes each."""

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    # rows of these arrays begin at multiples of 64 bytes: kernels are compiled for aligned pointers
    items, lanes = _aligned(slots + lanes), _aligned(lanes)
    return WorkList(
        item_lane=ints(layers, items),
        item_start=ints(layers, items),
        first_full=ints(layers, lanes),
        short_item=ints(layers, lanes),
        meta=ints(layers, 4),
        slots=slots,
        unit0=unit0,
    )


def _aligned(count: int) -> int:
    return -(-count // 16) * 16


def plan_work(work: WorkList, lens: Tensor, bounds: Bounds, kv_heads: int, block_rows: int) -> None:
    """Fill `work` for requests of `lens` rows; nothing is read back to the host.

    `block_rows`: rows that a program takes at a time; chunks are multiples of it.
    """
    layers = work.meta.shape[0]
    lanes = lens.shape[0] * kv_heads
    own = bounds.sink.dim() == 2  # bounds of their own for each request
    _plan_lanes[(layers,)](
        lens, bounds.sink, bounds.recent, bounds.sink.stride(0) if own else 0,
        work.item_lane, work.item_start, work.first_full, work.short_item, work.meta,
        work.max_items, work.first_full.shape[1], lanes, work.unit0, work.slots, MIN_CHUNK_ROWS,
        KV_HEADS=kv_heads, LANES=padded(lanes, 64), BLOCK_ROWS=block_rows, num_warps=8,
    )  # fmt: skip
    _plan_full_items[(layers, triton.cdiv(work.slots, ITEMS_PER_PROGRAM))](
        work.first_full, work.item_lane, work.item_start, work.meta,
        work.max_items, work.first_full.shape[1], lanes,
        STEPS=padded(lanes).bit_length(), ITEMS=ITEMS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip


@kernel("bounds_stride", "max_items", "max_lanes", "lanes", "unit0", "slots", "min_chunk")
def _plan_lanes(
    lens,
    sinks,
    recents,
    bounds_stride,
    item_lane,
    item_start,
    first_full,
    short_item,
    meta,
    max_items,
    max_lanes,
    lanes,
    unit0,
    slots,
    min_chunk,
    KV_HEADS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """One program per layer: the chunk, the place of every lane's items, and the short items themselves."""
    layer = tl.program_id(0)
    lane = tl.arange(0, LANES)
    real = lane < lanes
    request = lane // KV_HEADS
    unit = unit0 + layer * KV_HEADS + lane % KV_HEADS
    length = tl.load(lens + request, mask=real, other=0)
    sink = tl.load(sinks + request * bounds_stride + unit, mask=real, other=0)
    recent = tl.load(recents + request * bounds_stride + unit, mask=real, other=0)
    rows, _ = visible_rows(length - 1, length, sink, recent)

    whole = tl.sum(rows.to(tl.int64))
    share = (whole + slots * BLOCK_ROWS - 1) // (slots * BLOCK_ROWS) * BLOCK_ROWS
    even = tl.maximum(share, min_chunk).to(tl.int32)
    chunk = even
    found = 0
    for i in tl.static_range(STRETCHES + 1):
        # up to a quarter longer, if then every item starts at once: a second round would cost more
        longer = (even + even * i // (4 * STRETCHES) + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
        fits = (tl.sum((rows + longer - 1) // longer) <= slots) & (found == 0)
        chunk = tl.where(fits, longer, chunk)
        found = tl.where(fits, 1, found)
    full = rows // chunk
    left = rows - full * chunk
    before = tl.cumsum(full, 0) - full
    tl.store(first_full + layer * max_lanes + lane, before, mask=real)

    place = tl.zeros([LANES], tl.int32)
    next_item = tl.sum(full)
    # class 15 has the longest; lanes without a short item have class -1
    size = tl.where(left > 0, (left * SIZE_CLASSES - 1) // chunk, -1)
    for i in tl.static_range(SIZE_CLASSES):
        mine = (size == SIZE_CLASSES - 1 - i).to(tl.int32)
        place = tl.where(mine == 1, next_item + tl.cumsum(mine, 0) - 1, place)
        next_item += tl.sum(mine)
    tl.store(short_item + layer * max_lanes + lane, place, mask=real)
    tl.store(item_lane + layer * max_items + place, lane, mask=left > 0)
    tl.store(item_start + layer * max_items + place, full * chunk, mask=left > 0)
    tl.store(meta + layer * META, chunk)
    tl.store(meta + layer * META + 1, next_item)
    tl.store(meta + layer * META + 2, tl.sum(full))


@kernel("max_items", "max_lanes", "lanes")
def _plan_full_items(
    first_full,
    item_lane,
    item_start,
    meta,
    max_items,
    max_lanes,
    lanes,
    STEPS: tl.constexpr,
    ITEMS: tl.constexpr,
):
    """The full items: which lane is each of, found by bisection among the lanes' first items."""
    layer = tl.program_id(0)
    item = tl.program_id(1) * ITEMS + tl.arange(0, ITEMS)
    chunk = tl.load(meta + layer * META)
    firsts = first_full + layer * max_lanes
    # the last lane whose first item is not after this one: lanes without full items share their successor's
    low = tl.zeros([ITEMS], tl.int32)
    high = tl.zeros([ITEMS], tl.int32) + lanes
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        inside = high - low > 1
        first = tl.load(firsts + middle, mask=inside, other=0)
        low = tl.where(inside & (first <= item), middle, low)
        high = tl.where(inside & (first > item), middle, high)
    real = item < tl.load(meta + layer * META + 2)
    start = (item - tl.load(firsts + low, mask=real, other=0)) * chunk
    tl.store(item_lane + layer * max_items + item, low, mask=real)
    tl.store(item_start + layer * max_items + item, start, mask=real)
