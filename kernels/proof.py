"""Kernels against plain torch, on a small case of a server's own shapes, on its own device.

What a compiler or a driver got wrong on one machine shows here, before a server answers anything.  The case
is small and ragged: requests of one row, of a whole page and of several pages; the first KV head has sinks
and a window and no pages outside of them, the others keep everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvir.kernels import dispatch
from kvir.kernels.ops import FULL, Bounds, Cache, Kernels

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}  # of values around 1
SINK_ROWS = 3


@dataclass(frozen=True)
class Shapes:
    """Of one layer of a model."""

    query_heads: int
    kv_heads: int
    head_dim: int
    page_rows: int
    dtype: torch.dtype
    scale: float
    logit_cap: float = 0.0  # 0: none
    biased: bool = False  # rows have a logit bias
    whole: bool = False  # heads keep everything: no sinks, no window


def disagreements(kernels: Kernels, shapes: Shapes, device: torch.device | str) -> list[str]:
    """What differs from `kernels/ref`, in words; empty if nothing does."""
    return list(_Case(shapes, torch.device(device)).compare(kernels))


class _Case:
    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        self.shapes, self.device = shapes, device
        page, heads = shapes.page_rows, shapes.kv_heads
        self.lens = (1, page, 6 * page + 5)
        self.prefixes = (0, 0, 4 * page + 3)  # of an extend that goes on to the same lengths
        self._random = torch.Generator().manual_seed(1)
        tokens = sum(self.lens)
        self.k, self.v = self._rows(tokens, heads), self._rows(tokens, heads)
        self.q = self._rows(tokens, shapes.query_heads)
        counts = [-(-n // page) for n in self.lens]
        self.pages = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        order = torch.randperm(sum(counts), generator=self._random).to(torch.int32) + 1  # page 0 is padding
        for b, ids in enumerate(order.split(counts)):
            self.pages[b, : len(ids)] = ids
        self.unit0 = heads  # the second layer of two
        self.table = torch.full((sum(counts) + 1, 2 * heads), -1, dtype=torch.int32)
        self.head_pages = sum(counts) * heads
        ids = torch.randperm(self.head_pages, generator=self._random).to(torch.int32)
        self.table[1:, heads:] = ids.view(sum(counts), heads)
        sink, recent = (torch.zeros(2 * heads, dtype=torch.int32) for _ in range(2))
        recent[:] = FULL
        if not shapes.whole:
            sink[heads], recent[heads] = SINK_ROWS, page + 7
            self.table[self._row_of(2, 1), heads] = -1  # between the sinks and the window of the first head
        self.bounds = Bounds(sink, recent)

    def compare(self, kernels: Kernels) -> Iterator[str]:
        """Every op, once with all rows that are needed and once with one missing."""
        theirs, ours = (
            self._cache(kernels, self.device),
            self._cache(dispatch.get("ref"), torch.device("cpu")),
        )
        if not torch.equal(theirs.kv.cpu(), ours.kv):
            yield "append wrote other rows"
        for missing in (False, True):
            if missing:
                self.table[self._row_of(2, 4), self.unit0] = -1  # in the window of the first head
                theirs = Cache(theirs.kv, self.table.to(self.device), theirs.bias)
                ours = Cache(ours.kv, self.table, ours.bias)
            for op, run in (("decode", self._decode), ("extend", self._extend)):
                holes, out = run(kernels, theirs, self.device)
                expected_holes, expected = run(dispatch.get("ref"), ours, torch.device("cpu"))
                if holes != expected_holes:
                    yield f"{op} misses {holes} rows, not {expected_holes}"
                worst = float((out.cpu().float() - expected.float()).abs().max())
                if not missing and not worst <= TOLERANCE[self.shapes.dtype]:  # NaN, too
                    yield f"{op} differs by {worst:.1e}"

    # ---- parts ---------------------------------------------------------------------------------------------

    def _cache(self, kernels: Kernels, device: torch.device) -> Cache:
        """All rows appended."""
        shapes = self.shapes
        size = self.head_pages, 2, shapes.page_rows, shapes.head_dim
        cache = Cache(
            torch.zeros(size, dtype=shapes.dtype, device=device),
            self.table.to(device),
            torch.zeros(size[0], size[2], device=device) if shapes.biased else None,
        )
        slots = torch.cat([self._slots(b, n) for b, n in enumerate(self.lens)])
        kernels.append(self.k.to(device), self.v.to(device), cache, slots.to(device), self.unit0)
        return cache

    def _decode(self, kernels: Kernels, cache: Cache, device: torch.device) -> tuple[int, Tensor]:
        last = torch.tensor(self.lens).cumsum(0) - 1
        q = self.q[last].to(device)
        out = torch.full_like(q, torch.nan)
        holes = kernels.attend_decode(
            q, cache, self.pages.to(device), _ints(self.lens, device), self._bounds(device), self.unit0,
            self.shapes.kv_heads, self.shapes.scale, self.shapes.logit_cap, out,
        )  # fmt: skip
        return holes, out

    def _extend(self, kernels: Kernels, cache: Cache, device: torch.device) -> tuple[int, Tensor]:
        starts = torch.tensor((0, *self.lens)).cumsum(0)
        fresh = torch.cat(
            [
                torch.arange(int(start) + prefix, int(start) + n)
                for start, prefix, n in zip(starts, self.prefixes, self.lens, strict=False)
            ]
        )
        q, k, v = (x[fresh].to(device) for x in (self.q, self.k, self.v))
        extends = [n - prefix for n, prefix in zip(self.lens, self.prefixes, strict=True)]
        out = torch.full_like(q, torch.nan)
        holes = kernels.attend_extend(
            q, k, v, cache, self.pages.to(device), _ints(self.prefixes, device), _ints(extends, device),
            self._bounds(device), self.unit0, self.shapes.scale, self.shapes.logit_cap, out,
        )  # fmt: skip
        return holes, out

    def _rows(self, tokens: int, heads: int) -> Tensor:
        size = tokens, heads, self.shapes.head_dim
        return torch.randn(size, generator=self._random).to(self.shapes.dtype)

    def _slots(self, request: int, tokens: int) -> Tensor:
        """int64 [tokens]: logical token ids."""
        position = torch.arange(tokens)
        page = self.pages[request, position // self.shapes.page_rows].long()
        return page * self.shapes.page_rows + position % self.shapes.page_rows

    def _row_of(self, request: int, page: int) -> int:
        return int(self.pages[request, page])

    def _bounds(self, device: torch.device) -> Bounds:
        return Bounds(self.bounds.sink.to(device), self.bounds.recent.to(device))


def _ints(values: tuple[int, ...] | list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)
