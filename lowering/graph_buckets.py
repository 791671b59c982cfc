"""KernelPlan -> GraphBuckets: the decode batches that are captured as graphs, as data.  A CPU has none.

A graph replays with fixed shapes, so each bucket has static buffers: page lists as long as the model's
context, lengths, slots of the new rows, the partial results of attention that is split over the sequence, and
of units that select by score the lists of compact pages and their lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvir.lowering.course import most_compact_pages
from kvir.lowering.device_facts import DEVICES, DeviceFacts, multiprocessors
from kvir.lowering.footprint import ceil_div
from kvir.lowering.stages import GraphBucket, GraphBuckets, KernelPlan, LayoutPlan

MAX_BATCH = 256
MAX_SPLITS = 64
WAVES = 2  # blocks per multiprocessor that hide the latency of memory


@dataclass(frozen=True)
class ChooseBuckets:
    name: ClassVar[str] = "buckets"

    def __call__(self, kernels: KernelPlan) -> GraphBuckets:
        device = DEVICES[kernels.device]
        return GraphBuckets(kernels=kernels, decode=decode_buckets(kernels.layout, device))


def decode_buckets(layout: LayoutPlan, device: DeviceFacts) -> tuple[GraphBucket, ...]:
    """One bucket per batch size of SGLang's own list (`cuda_graph_hook.py`), so no batch pads further."""
    if device.kind == "cpu":
        return ()
    sizes = (1, 2, 4, 8, 12, *range(16, MAX_BATCH + 1, 8))
    return tuple(
        GraphBucket(
            batch=batch,
            splits=(n := splits(batch, layout.kv_heads, device)),
            static_bytes=static_bytes(batch, n, layout),
        )
        for batch in sizes
    )


def splits(batch: int, kv_heads: int, device: DeviceFacts) -> int:
    """Into how many parts each sequence is cut, so that a small batch still fills the device."""
    blocks = WAVES * multiprocessors(device)
    return min(MAX_SPLITS, ceil_div(blocks, batch * kv_heads))


def static_bytes(batch: int, splits: int, layout: LayoutPlan) -> int:
    """Bytes of the static buffers of one bucket."""
    max_pages = ceil_div(layout.budgeted.bound.model.context_tokens, layout.page_tokens)
    request = 4 * max_pages + 4 + 8  # int32 pages, int32 length, int64 slot of the new row
    for c in layout.compact:
        request += 4 * len(c.units) * (most_compact_pages(layout, c) + 1)  # int32 pages, int32 length
    # float32 output, maximum and sum of each part
    partial = layout.query_heads * splits * (layout.head_dim + 2) * 4 if splits > 1 else 0
    return batch * (request + partial)
