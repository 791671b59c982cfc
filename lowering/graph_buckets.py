"""KernelPlan -> GraphBuckets: the decode batches that are captured as graphs, as data.  A CPU has none.

A graph replays with fixed shapes, so each bucket has static buffers: page lists as long as the model's
context, lengths, slots of the new rows, the partial results of attention that is split over the sequence, and
of units that select by score the lists of compact pages and their lengths.  Where Triton kernels decode, the
buffers are those of `kernels/triton/decoder.py`, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvir.lowering.course import most_compact_pages
from kvir.lowering.device_facts import DEVICES, DeviceFacts, multiprocessors
from kvir.lowering.footprint import ceil_div
from kvir.lowering.stages import GraphBucket, GraphBuckets, KernelChoice, KernelPlan, LayoutPlan
from kvir.lowering.triggers import trigger_bytes

MAX_BATCH = 256
MAX_SPLITS = 64
WAVES = 2  # blocks per multiprocessor that hide the latency of memory


@dataclass(frozen=True)
class ChooseBuckets:
    name: ClassVar[str] = "buckets"

    def __call__(self, kernels: KernelPlan) -> GraphBuckets:
        device = DEVICES[kernels.device]
        return GraphBuckets(kernels=kernels, decode=decode_buckets(kernels.layout, device, kernels.choices))


def decode_buckets(
    layout: LayoutPlan, device: DeviceFacts, choices: Sequence[KernelChoice] = ()
) -> tuple[GraphBucket, ...]:
    """One bucket per batch size of SGLang's own list (`cuda_graph_hook.py`), so no batch pads further.

    `choices` are the kernels; without them buffers are counted as for kernels that cut sequences evenly.
    """
    if device.kind == "cpu":
        return ()
    sizes = (1, 2, 4, 8, 12, *range(16, MAX_BATCH + 1, 8))
    tile = next((c.tile for c in choices if c.op == "attend_decode" and c.tile is not None), None)
    buckets: list[GraphBucket] = []
    for batch in sizes:
        n = splits(batch, layout.kv_heads, device)
        if tile is None:
            size = static_bytes(batch, n, layout)
        else:
            size = decoder_bytes(batch, tile.blocks * multiprocessors(device), layout)
        buckets.append(GraphBucket(batch=batch, splits=n, static_bytes=size))
    return tuple(buckets)


def splits(batch: int, kv_heads: int, device: DeviceFacts) -> int:
    """Into how many parts each sequence is cut, so that a small batch still fills the device."""
    blocks = WAVES * multiprocessors(device)
    return min(MAX_SPLITS, ceil_div(blocks, batch * kv_heads))


def decoder_bytes(batch: int, slots: int, layout: LayoutPlan) -> int:
    """Bytes of the static memory of Triton's decode and its selections; `slots`: blocks that run at once."""
    lanes = batch * layout.kv_heads
    items, lanes = _aligned(slots + lanes), _aligned(lanes)
    layers = len(layout.budgeted.bound.model.layers)
    spare = max((most_compact_pages(layout, c) for c in layout.compact), default=0)
    pages = ceil_div(layout.budgeted.bound.model.context_tokens, layout.page_tokens) + spare
    request = pages + 1 + max(1, spare) + 1  # page list, length, spare rows and their number
    if spare:
        request += 2 * layout.unit_count  # bounds of its own
    work = layers * (2 * items + 2 * lanes + 4)
    group = layout.query_heads // layout.kv_heads
    partial = items * group * (layout.head_dim + 1)
    return 4 * (batch * request + work + partial + 1) + trigger_bytes(batch, batch, layout)


def _aligned(count: int) -> int:
    return ceil_div(count, 16) * 16


def static_bytes(batch: int, splits: int, layout: LayoutPlan) -> int:
    """Bytes of the static buffers of one bucket."""
    max_pages = ceil_div(layout.budgeted.bound.model.context_tokens, layout.page_tokens)
    request = 4 * max_pages + 4 + 8  # int32 pages, int32 length, int64 slot of the new row
    for c in layout.compact:
        request += 4 * len(c.units) * (most_compact_pages(layout, c) + 1)  # int32 pages, int32 length
    # float32 output, maximum and sum of each part
    partial = layout.query_heads * splits * (layout.head_dim + 2) * 4 if splits > 1 else 0
    return batch * (request + partial)
