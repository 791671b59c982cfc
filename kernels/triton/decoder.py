"""Decode of all layers of a model from static memory: what a captured graph replays.

A step has two halves.  `place` runs on the host before it: where compact rows of requests are, copied into
memory that never moves.  `plan` and `attend` launch kernels and read nothing back, so they can be captured:
replayed, they follow the lengths, page lists and bounds that lie in memory then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvir.kernels.catalog import Tile
from kvir.kernels.ops import Bounds, Cache
from kvir.kernels.triton.ops import empty_partials, launch_decode, resident_blocks
from kvir.kernels.triton.settings import kernel
from kvir.kernels.triton.work import empty_work, plan_work

PAGES_PER_PROGRAM = 256


@dataclass(frozen=True)
class Sizes:
    """How much of everything there is at most."""

    batch: int
    pages: int  # of a request, logical ones
    spare_pages: (
        int  # of a request, before its logical pages: they lead to compact rows; 0 if no unit selects
    )
    layers: int
    kv_heads: int
    query_heads: int
    head_dim: int
    page_rows: int


@dataclass(frozen=True)
class Placed:
    """How one request is read whose rows were compacted."""

    spare_rows: Tensor  # int32 [spare pages], rows of the residency table
    sink: Tensor  # int32 [U]
    recent: Tensor  # int32 [U]


class Decoder:
    """Static memory for batches of up to `sizes.batch` requests, and the launches that use it."""

    def __init__(self, sizes: Sizes, tile: Tile, bounds: Bounds, device: torch.device | str) -> None:
        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.sizes, self._tile, self._device = sizes, tile, torch.device(device)
        self._plain = bounds  # of the plan, int32 [U], the same for all requests
        self._on_host = Bounds(bounds.sink.cpu(), bounds.recent.cpu())
        self.pages = ints(sizes.batch, sizes.pages + sizes.spare_pages)
        self.lens = ints(sizes.batch)
        self._spare = ints(sizes.batch, max(1, sizes.spare_pages))
        self.spare_counts = ints(sizes.batch)
        self._own: Bounds | None = None
        if sizes.spare_pages:
            self._own = Bounds(bounds.sink.repeat(sizes.batch, 1), bounds.recent.repeat(sizes.batch, 1))
        self._touched = 0  # requests whose own bounds may differ from the plan's
        slots = resident_blocks(self._device, tile)
        self.work = empty_work(sizes.layers, sizes.batch * sizes.kv_heads, slots, device)
        self.partials = empty_partials(self.work, sizes.query_heads // sizes.kv_heads, sizes.head_dim)
        self.holes = ints(1)

    @property
    def nbytes(self) -> int:
        """Of all the memory; the planner counts the same (`lowering/graph_buckets.py`)."""
        own = () if self._own is None else (self._own.sink, self._own.recent)
        work, partials = self.work, self.partials
        lists = (work.item_lane, work.item_start, work.first_full, work.short_item, work.meta)
        request = (self.pages, self.lens, self._spare, self.spare_counts)
        return sum(x.nbytes for x in (*request, *own, *lists, partials.out, partials.lse, self.holes))

    def place(self, requests: Sequence[Placed | None]) -> None:
        """Before a step: the compact rows of its requests; None for those that have none."""
        anything = any(each is not None for each in requests)
        if self._own is None or not (anything or self._touched):
            return
        # rows that an earlier step has written go back to the plan's own bounds
        count = max(len(requests), self._touched)
        self._touched = len(requests) if anything else 0
        spare = torch.zeros((count, self._spare.shape[1]), dtype=torch.int32)
        counts = torch.zeros(count, dtype=torch.int32)
        sink, recent = (x.repeat(count, 1) for x in (self._on_host.sink, self._on_host.recent))
        for i, each in enumerate(requests):
            if each is not None:
                counts[i] = len(each.spare_rows)
                spare[i, : len(each.spare_rows)] = each.spare_rows
                sink[i], recent[i] = each.sink, each.recent
        self._spare[:count].copy_(spare, non_blocking=True)
        self.spare_counts[:count].copy_(counts, non_blocking=True)
        self._own.sink[:count].copy_(sink, non_blocking=True)
        self._own.recent[:count].copy_(recent, non_blocking=True)

    def plan(self, req_to_token: Tensor, rows: Tensor, seq_lens: Tensor) -> None:
        """Page lists, lengths and work lists of a step.

        req_to_token: int32 [requests, tokens], logical token ids; rows: int64 [B], its rows; seq_lens: int
        [B], 0 for padding.
        """
        batch = rows.shape[0]
        grid = (batch, triton.cdiv(self.pages.shape[1], PAGES_PER_PROGRAM))
        page_lists[grid](
            req_to_token, rows, seq_lens, self._spare, self.spare_counts, self.pages, self.lens,
            req_to_token.stride(0), self._spare.stride(0), self.pages.stride(0), self.pages.shape[1],
            P=self.sizes.page_rows, PAGES=PAGES_PER_PROGRAM,
        )  # fmt: skip
        plan_work(
            self.work, self.lens[:batch], self.bounds(batch), self.sizes.kv_heads, self._tile.rows
        )  # fmt: skip

    def attend(
        self, layer: int, q: Tensor, cache: Cache, scale: float, logit_cap: float, out: Tensor
    ) -> None:
        """Attention of one layer: q, out [B, Hq, D].  What is missing is added to `holes`."""
        batch = q.shape[0]
        launch_decode(
            q, cache, self.pages[:batch], self.lens[:batch], self.bounds(batch), self.work, layer,
            self.partials, self.sizes.kv_heads, scale, logit_cap, out, self.holes, tile=self._tile,
        )  # fmt: skip

    def bounds(self, batch: int) -> Bounds:
        """What the requests of a step see; [B, U] where rows may be compact."""
        if self._own is None:
            return self._plain
        return Bounds(self._own.sink[:batch], self._own.recent[:batch])


@kernel("req_stride", "spare_stride", "pages_stride", "max_pages")
def page_lists(
    req_to_token,  # int32 [requests, tokens]
    rows,  # int64 [B]
    seq_lens,  # int [B]
    spare,  # int32 [B, spare pages]
    spare_counts,  # int32 [B]
    pages,  # int32 [B, max_pages], written
    lens,  # int32 [B], written
    req_stride,
    spare_stride,
    pages_stride,
    max_pages,
    P: tl.constexpr,
    PAGES: tl.constexpr,
):
    """The pages that a step reads: spare ones, then the logical pages of all tokens; -1 behind them."""
    b = tl.program_id(0)
    i = tl.program_id(1) * PAGES + tl.arange(0, PAGES)
    tokens = tl.load(seq_lens + b).to(tl.int32)
    before = tl.load(spare_counts + b)
    of_request = req_to_token + tl.load(rows + b).to(tl.int64) * req_stride
    first = (i - before) * P
    logical = tl.load(of_request + first, mask=(first >= 0) & (first < tokens), other=-P) // P
    page = tl.load(spare + b * spare_stride + i, mask=i < before, other=-1)
    page = tl.where(i < before, page, tl.where(first < tokens, logical, -1))
    tl.store(pages + b * pages_stride + i, page.to(tl.int32), mask=i < max_pages)
    if tl.program_id(1) == 0:
        tl.store(lens + b, tl.where(tokens > 0, tokens + before * P, 0))
