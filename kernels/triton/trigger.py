"""A selection of a decode step from static memory: what a captured graph replays when a trigger fires.

Every step keeps its queries in a ring (`remember`).  A step in which a request selects goes on from there,
for all layers at once (`select`): weights of the last queries, the rows that hold the mass, and the copy that
closes the gaps.  Which requests select, and where their rows may go, the host has written before the step
(`place`); which rows stayed it reads after it (`chosen`).  Between the two nothing is read on the host, and
no launch depends on a length, so the step can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvir.kernels.ops import Cache
from kvir.kernels.triton.decoder import Decoder
from kvir.kernels.triton.nucleus import choose_rows, close_gaps
from kvir.kernels.triton.settings import MIN_DOT, padded, widen
from kvir.kernels.triton.window import remember_queries, window_lse, window_means

SCORED_ROWS = 64  # at a time
SCORERS = 8  # programs of a lane
SCORED_QUERIES = 32
CHOSEN_ROWS = 256
COPIED_ROWS = 32


@dataclass(frozen=True)
class Nuclei:
    """How units select: the best rows that hold a mass of the attention of the last queries.

    A fixed number of rows n is a mass of 0, a floor and a cap of n.
    """

    windows: Tensor  # int32 [U]: last queries that are observed; 0 for units that never select
    masses: Tensor  # float64 [U]
    floors: Tensor  # int32 [U]
    caps: Tensor  # int32 [U]


@dataclass(frozen=True)
class Due:
    """One request that selects in this step; rows are counted as its units see them, the oldest first."""

    moves: Tensor  # bool [U]: units that select
    candidates: Tensor  # int32 [U, 2]: a run of rows
    left: Tensor  # int32 [U]: last rows, which stay where they are
    placed: Tensor  # int32 [U]: first rows, which lie in `dest` already
    dest: Tensor  # int32 [U, pages]: head-pages for the rows that stay; -1 where there are none


@dataclass(frozen=True)
class Chosen:
    """What one request's selection has left, on the host."""

    counts: Tensor  # int32 [U]: rows in `dest`
    kept: Tensor  # bool [U, candidates]


class Trigger:
    """Static memory for the selections of a decoder's batches, and the launches that use it."""

    def __init__(
        self, decoder: Decoder, nuclei: Nuclei, *, ring_rows: int, candidates: int, dtype: torch.dtype
    ) -> None:
        """`ring_rows`: requests that the server knows at once; `candidates`: of a unit, at most."""
        sizes, device = decoder.sizes, decoder.pages.device
        units = sizes.layers * sizes.kv_heads
        self._decoder, self.candidates = decoder, candidates
        self._nuclei = Nuclei(
            *(x.to(device) for x in (nuclei.windows, nuclei.masses, nuclei.floors, nuclei.caps))
        )
        self.window = max(1, int(nuclei.windows.max()))

        def ints(*shape: int) -> Tensor:
            return torch.zeros((sizes.batch, units, *shape), dtype=torch.int32, device=device)

        ring = (ring_rows, sizes.layers, self.window, sizes.query_heads, sizes.head_dim)
        self.ring = torch.zeros(ring, dtype=dtype, device=device)
        self._moves, self._left, self._placed, self._counts = ints(), ints(), ints(), ints()
        self._runs, self._dest = ints(2), ints(max(1, sizes.spare_pages))
        floats = (sizes.batch, units)
        pairs = self.window * (sizes.query_heads // sizes.kv_heads)
        self._lse = torch.zeros((*floats, pairs), dtype=torch.float32, device=device)
        self._scores = torch.zeros((*floats, candidates), dtype=torch.float32, device=device)
        self._kept = torch.zeros((*floats, candidates), dtype=torch.int8, device=device)
        self._due: list[int] = []

    @property
    def nbytes(self) -> int:
        """Of all the memory."""
        of_lanes = (self._moves, self._left, self._placed, self._counts, self._runs, self._dest)
        return sum(x.nbytes for x in (self.ring, *of_lanes, self._lse, self._scores, self._kept))

    # ---- on the host ---------------------------------------------------------------------------------------

    def place(self, requests: Sequence[Due | None]) -> None:
        """Before a step: those of its requests that select in it, with `Decoder.place`."""
        due = [i for i, each in enumerate(requests) if each is not None]
        for i in self._due:
            self._moves[i].zero_()
        self._due = due
        for i in due:
            each = requests[i]
            assert each is not None
            self._moves[i].copy_(each.moves.to(torch.int32), non_blocking=True)
            self._runs[i].copy_(each.candidates, non_blocking=True)
            self._left[i].copy_(each.left, non_blocking=True)
            self._placed[i].copy_(each.placed, non_blocking=True)
            self._dest[i, :, : each.dest.shape[1]].copy_(each.dest, non_blocking=True)
            self._dest[i, :, each.dest.shape[1] :].fill_(-1)

    def chosen(self) -> dict[int, Chosen]:
        """After a step: what its selections left, by place in the batch.  Waits for the device."""
        return {i: Chosen(self._counts[i].cpu(), self._kept[i].cpu().bool()) for i in self._due}

    # ---- on the device -------------------------------------------------------------------------------------

    def remember(self, layer: int, q: Tensor, rows: Tensor, ends: Tensor) -> None:
        """Keep queries [T, Hq, D] of a layer; rows int64 [T]: of the ring; ends int [T]: tokens up to the
        query's own, 0 for padding.

        A longer chunk is given by its last `window` queries of each request.
        """
        heads, dim = q.shape[1:]
        remember_queries[(q.shape[0],)](
            q, self.ring, rows, ends, layer, self.ring.shape[0], self.window,
            q.stride(0), q.stride(1), self.ring.stride(0), self.ring.stride(1),
            HQ=heads, HEADS=padded(heads), D=dim, DIM=padded(dim),
        )  # fmt: skip

    def select(self, cache: Cache, rows: Tensor, scale: float, logit_cap: float) -> None:
        """After all layers of a step whose page lists the decoder has made; rows int64 [B], of the ring."""
        decoder, nuclei, ring = self._decoder, self._nuclei, self.ring
        sizes, batch, bounds = decoder.sizes, rows.shape[0], decoder.bounds(rows.shape[0])
        units, group = sizes.layers * sizes.kv_heads, sizes.query_heads // sizes.kv_heads
        lanes, dim = batch * units, padded(sizes.head_dim, MIN_DOT)
        facts = (
            decoder.lens, decoder.spare_counts, bounds.sink, bounds.recent, nuclei.windows, self._moves,
        )  # fmt: skip
        paging = (
            cache.kv.shape[0], cache.table.shape[0], decoder.pages.shape[1], cache.table.stride(0),
            decoder.pages.stride(0),
        )  # fmt: skip
        strides = ring.stride(0), ring.stride(1), scale, logit_cap
        shapes = {"UNITS": units, "D": sizes.head_dim, "DIM": dim, "P": sizes.page_rows}
        scoring = shapes | {
            "KV_HEADS": sizes.kv_heads, "HQ": sizes.query_heads, "G": group, "QUERIES": SCORED_QUERIES,
            "ROWS": SCORED_ROWS if dim <= 128 else SCORED_ROWS // 2,  # keys of 256 fill the registers
            "CAP": logit_cap > 0, "WIDEN": widen(ring),
        }  # fmt: skip
        pairs = self._lse.shape[2]
        window_lse[(lanes, triton.cdiv(pairs, SCORED_QUERIES))](
            ring, rows, cache.kv, cache.table, decoder.pages, *facts, self._lse, *paging, self.window, pairs,
            *strides, **scoring,
        )  # fmt: skip
        window_means[(lanes, min(SCORERS, triton.cdiv(self.candidates, SCORED_ROWS)))](
            ring, rows, cache.kv, cache.table, decoder.pages, *facts, self._lse, self._runs, self._scores,
            *paging, self.window, pairs, self.candidates, *strides, **scoring,
        )  # fmt: skip
        choose_rows[(lanes,)](
            *facts, self._runs, self._left, self._scores, nuclei.masses, nuclei.floors, nuclei.caps,
            self._kept, self._counts, self.candidates, UNITS=units, P=sizes.page_rows, ROWS=CHOSEN_ROWS,
        )  # fmt: skip
        close_gaps[(lanes,)](
            cache.kv, cache.table, decoder.pages, *facts, self._runs, self._left, self._kept, self._placed,
            self._dest, *paging, self.candidates, self._dest.shape[2], ROWS=COPIED_ROWS, **shapes,
        )  # fmt: skip
