"""Kernels of selections against plain torch, on a server's own device, as `proof` does for attention.

Rows are random and their scores seldom close, but kernels add up in another order: a row or two at the edge
of a choice may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvir.kernels.copy_ops import CopyKernels
from kvir.kernels.ops import FULL, Bounds, Cache
from kvir.kernels.proof import TOLERANCE, Shapes
from kvir.kernels.ref.compact import COPIES
from kvir.kernels.ref.score import score
from kvir.kernels.ref.score_running import SUMS
from kvir.kernels.ref.select_mass import select_top_p
from kvir.kernels.score_ops import ScoreInputs, SumKernels
from kvir.policy_ir.scores import Accumulated, Attention

if TYPE_CHECKING:
    from kvir.kernels.triton.trigger import Chosen, Trigger

WINDOW, MASS, FLOOR, SINK = 8, 0.6, 4, 2
AT_THE_EDGE = 2  # rows of a head


def wrong_sums(sums: SumKernels, shapes: Shapes, device: torch.device | str) -> list[str]:
    """What differs from the reference in sums over all queries, in words: a prompt in two chunks."""
    q, k, _ = _tensors(shapes, tokens=90)
    found: list[dict[str, Tensor]] = []
    for kernels, where in ((sums, torch.device(device)), (SUMS, torch.device("cpu"))):
        running = kernels.running_of(
            Accumulated(),
            shapes.query_heads,
            shapes.scale,
            tokens=90,
            logit_cap=shapes.logit_cap,
            device=where,
        )
        parts: dict[str, Tensor] = {}
        for start, stop in ((0, 37), (37, 90)):
            positions = torch.arange(start, stop, device=where)
            given = q[start:stop].to(where), k[:stop].to(where), positions
            lse = kernels.log_sum_exp(*given, shapes.scale, logit_cap=shapes.logit_cap)
            running.update(given[0], lse, *given[1:])
            parts[f"log-sum-exp of {start}..{stop}"] = lse.cpu()
        parts["sums"] = running.sums().values.cpu()
        found.append(parts)
    theirs, ours = found
    return [
        f"{name} differ by {worst:.1e}"
        for name, wanted in ours.items()
        if not (worst := float((theirs[name] - wanted).abs().max())) <= TOLERANCE[shapes.dtype]  # NaN, too
    ]


def wrong_copies(copies: CopyKernels, shapes: Shapes, device: torch.device | str) -> list[str]:
    """What differs in the copies of rows that stay: units that keep none, a page and a row, and all of 90."""
    _, k, v = _tensors(shapes, tokens=90)
    heads, size = k.shape[1], shapes.page_rows
    counts = [(0, size + 1, 90)[head % 3] for head in range(heads)]
    order = torch.Generator().manual_seed(3)
    rows = [torch.randperm(90, generator=order)[:count].sort().values for count in counts]
    ids = torch.randperm(heads * 90, generator=order).split(90)
    pages = [mine[: -(-count // size)] for mine, count in zip(ids, counts, strict=True)]
    found: list[Tensor] = []
    for kernels, where in ((copies, torch.device(device)), (COPIES, torch.device("cpu"))):
        kv = torch.zeros((heads * 90, 2, size, shapes.head_dim), dtype=shapes.dtype, device=where)
        kernels.compact_units(k.to(where), v.to(where), [mine.to(where) for mine in rows], kv, pages)
        found.append(kv.cpu())
    return [] if torch.equal(*found) else ["copies of the rows that stay differ"]


def wrong_trigger(shapes: Shapes, device: torch.device | str) -> list[str]:
    """What differs in a selection of decode by Triton: rows that stay, and where they lie."""
    return list(_Selection(shapes, torch.device(device)).compare())


class _Selection:
    """One request of one layer, all of whose heads select."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        size, heads = shapes.page_rows, shapes.kv_heads
        self.shapes, self.device = shapes, device
        self.tokens, self.pages, self.cap = 3 * size + 5, 4, 2 * size
        self.run = SINK, self.tokens - WINDOW
        self.q, self.k, self.v = _tensors(shapes, self.tokens)
        # row 0 is padding, then the logical pages, then the rows of the compact ones
        ids = torch.randperm(2 * self.pages * heads, generator=torch.Generator().manual_seed(2)).to(
            torch.int32
        )
        self.dense, self.dest = ids.view(2, self.pages, heads)
        self.kv = torch.zeros((len(ids), 2, size, shapes.head_dim), dtype=shapes.dtype)
        for head in range(heads):
            rows = torch.stack([self.k[:, head], self.v[:, head]], dim=1)
            padded = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, self.pages * size - self.tokens))
            self.kv[self.dense[:, head].long()] = padded.unflatten(0, (self.pages, size)).transpose(1, 2)

    def compare(self) -> Iterator[str]:
        chosen, kv = self._select()
        for head in range(self.shapes.kv_heads):
            flags = chosen.kept[head, : self.run[1] - self.run[0]]
            wanted = torch.zeros_like(flags)
            wanted[self._expected(head)] = True
            other = int((flags != wanted).sum())
            if other > AT_THE_EDGE:
                yield f"a selection of decode takes {other} other rows"
            stays = torch.ones(self.tokens, dtype=torch.bool)
            stays[slice(*self.run)] = flags
            if int(chosen.counts[head]) != int(stays.sum()):
                yield f"a selection of decode counts {int(chosen.counts[head])} rows, not {int(stays.sum())}"
            moved = kv[self.dest[:, head].long()].transpose(0, 1).flatten(1, 2)[:, : int(stays.sum())]
            if not torch.equal(moved, torch.stack([self.k[stays, head], self.v[stays, head]])):
                yield "a selection of decode leaves other rows than it took"

    # ---- parts ---------------------------------------------------------------------------------------------

    def _select(self) -> tuple[Chosen, Tensor]:
        """By the kernels: what was chosen, and the pool after it."""
        from kvir.kernels.triton.trigger import Due

        heads, device = self.shapes.kv_heads, self.device
        table = torch.full((2 * self.pages + 1, heads), -1, dtype=torch.int32)
        table[1 : self.pages + 1] = self.dense
        cache = Cache(self.kv.to(device), table.to(device))
        trigger = self._trigger()
        row = torch.zeros(1, dtype=torch.int64, device=device)
        ends = torch.arange(self.tokens - WINDOW, self.tokens, device=device) + 1
        trigger.remember(0, self.q[-WINDOW:].to(device), row.expand(WINDOW).contiguous(), ends)
        ones, zeros = torch.ones(heads, dtype=torch.bool), torch.zeros(heads, dtype=torch.int32)
        runs = torch.tensor([self.run] * heads, dtype=torch.int32)
        trigger.place([Due(ones, runs, left=zeros, placed=zeros, dest=self.dest.T.contiguous())])
        trigger.select(cache, row, self.shapes.scale, self.shapes.logit_cap)
        return trigger.chosen()[0], cache.kv.cpu()

    def _trigger(self) -> Trigger:
        """After a step's page lists have been made."""
        from kvir.kernels.triton.decoder import Decoder, Sizes
        from kvir.kernels.triton.ops import tile_of_decode
        from kvir.kernels.triton.trigger import Nuclei, Trigger

        shapes, heads, device = self.shapes, self.shapes.kv_heads, self.device
        sizes = Sizes(
            1, self.pages, self.pages, 1, heads, shapes.query_heads, shapes.head_dim, shapes.page_rows
        )
        zeros = torch.zeros(heads, dtype=torch.int32, device=device)
        tile = tile_of_decode(self.q.to(device), heads)
        decoder = Decoder(sizes, tile, Bounds(zeros, torch.full_like(zeros, FULL)), device)
        tokens = torch.arange(self.pages * shapes.page_rows, dtype=torch.int32, device=device)
        row = torch.zeros(1, dtype=torch.int64, device=device)
        decoder.plan((tokens + shapes.page_rows)[None], row, row + self.tokens)
        units = torch.ones(heads, dtype=torch.int32)
        nuclei = Nuclei(units * WINDOW, units.double() * MASS, units * FLOOR, units * self.cap)
        return Trigger(decoder, nuclei, ring_rows=1, candidates=self.tokens, dtype=shapes.dtype)

    def _expected(self, head: int) -> Tensor:
        """By the reference: candidates that stay."""
        group = self.shapes.query_heads // self.shapes.kv_heads
        inputs = ScoreInputs(
            k=self.k[:, head : head + 1].float(),
            v=self.v[:, head : head + 1].float(),
            candidates=self.run,
            scale=self.shapes.scale,
            logit_cap=self.shapes.logit_cap,
            q_obs=self.q[-WINDOW:, head * group : (head + 1) * group].float(),
        )
        scores = score(Attention(window=WINDOW), inputs)[0, slice(*self.run)]
        return select_top_p(scores, scores, MASS, floor=FLOOR, cap=self.cap)


def _tensors(shapes: Shapes, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, Hq, D], k and v [T, Hkv, D], the same at every call."""
    random = torch.Generator().manual_seed(3)
    sizes = shapes.query_heads, shapes.kv_heads, shapes.kv_heads
    q, k, v = (torch.randn(tokens, n, shapes.head_dim, generator=random).to(shapes.dtype) for n in sizes)
    return q, k, v
