"""A server in miniature: the real allocator and residency, and around them the smallest scheduler, prefix
tree and "model" that can go wrong in every way that the real ones can.

Rows are labels, not vectors: the row of token j for unit u holds a hash of the whole prefix up to j and of u.
A forward reads every row that its queries may see, layer by layer, in the order of a real forward (read the
layer, then write the layer), and compares labels: a stale, foreign, overwritten or missing row is found at
once.  Milliseconds per request instead of seconds.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import torch

from kvir.lowering.stages import ExecutionPlan
from kvir.sglang_ext.accounting import violations
from kvir.sglang_ext.allocator import KvirAllocator
from kvir.sglang_ext.pool import KvirPool
from kvir.sglang_ext.ranks import ALONE, Ranks
from support.label_model import LabelModel
from support.prefix_tree import P, Request, Tree


class AllRanks(Ranks):
    """The forwards of every rank are played on one device; a head-page is one of its rank's pool still."""

    def heads(self, kv_heads: int, rank: int | None = None) -> range:
        return range(kv_heads) if rank is None else super().heads(kv_heads, rank)


class Simulation(LabelModel):
    def __init__(
        self,
        plan: ExecutionPlan,
        physical_tokens: int,
        *,
        chunk_tokens: int,
        seed: int = 0,
        ranks: Ranks = ALONE,
    ) -> None:
        logical = physical_tokens * plan.layout.logical_ratio
        self.pool = KvirPool(
            plan,
            logical_tokens=logical,
            physical_tokens=physical_tokens,
            shadow_rows=64,
            dtype=torch.float32,
            device="cpu",
            ranks=ranks,
        )
        self.allocator = KvirAllocator(
            logical, torch.float32, "cpu", self.pool, need_sort=False, debug=True, chunk_tokens=chunk_tokens
        )
        self.tree: Any = Tree(self.allocator)
        self.chunk_tokens = chunk_tokens
        self.random = random.Random(seed)
        self.waiting: list[Request] = []
        self.prefilling: Request | None = None
        self.decoding: list[Request] = []
        self.pending: list[Any] = []  # results of the step before, processed after the next launch (overlap)
        self.overlap = False
        self.retract_share = 0.0
        self.cancel_share = 0.0
        self.finished: list[Request] = []
        self.prepare_model()

    # ---- scheduling ----------------------------------------------------------------------------------------

    def run(self, requests: list[Request], *, at_once: int = 8) -> None:
        self.waiting = list(requests)
        while self.waiting or self.prefilling or self.decoding or self.pending:
            launched = self._extend(at_once) or self._decode()
            if not self.overlap or not launched:
                self._process()
            elif len(self.pending) > 1:
                self._process_one()
            self.check()
        assert not self.allocator.residency.requests

    def check(self) -> None:
        found = violations(self.allocator)
        assert not found, found
        res = self.allocator.residency
        assert (res.pool.free + res.pool.quarantined + res.pool.resident == res.pool.size).all()

    def _batch(self, requests: list[Request], *, decode: bool, ends: list[int]) -> Any:
        return SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: decode),
            reqs=requests,
            tree_cache=self.tree,
            prefix_lens=[r.done for r in requests],
            extend_lens=[end - r.done for r, end in zip(requests, ends, strict=True)],
        )

    def _extend(self, at_once: int) -> bool:
        """The rest of a chunked prompt first; then new requests fill the chunk."""
        budget, batch, ends = self.chunk_tokens, [], []
        memory = self.allocator.create_prefill_budget(self.tree, num_mixed_decode_tokens=0)
        memory.total_offset += sum(r.new_tokens - len(r.output_ids) for r in self.decoding)
        if self.prefilling is not None:
            if self.overlap and any(request is self.prefilling for _, request, _ in self._flat()):
                self._process()  # SGLang stashes the chunk (checkpoint) before it schedules the next
            self._take(self.prefilling, budget, batch, ends)
            budget -= ends[-1] - batch[-1].done
        while self.waiting and budget > 0 and len(self.decoding) + len(batch) < at_once:
            request = self.waiting[0]
            pages = self.tree.match(request)
            request.done = request.cached_tokens = len(pages) * P
            if not self._admit(memory, request, bool(batch)):
                self.tree.unlock(request)
                request.done = 0
                break
            self.waiting.pop(0)
            request.running = True
            request.prompt_tokens = len(request.tokens)
            request.row, request.owned = list(pages), len(pages)
            self._take(request, budget, batch, ends)
            budget -= ends[-1] - request.done
        if not batch:
            return False
        self._launch(batch, ends, decode=False)
        last = batch[-1]
        self.prefilling = last if last.done < len(last.tokens) else None
        self.decoding += [r for r in batch if r.done == len(r.tokens)]
        return True

    def _take(self, request: Request, budget: int, batch: list[Request], ends: list[int]) -> None:
        batch.append(request)
        ends.append(min(len(request.tokens), request.done + budget))

    def _admit(self, memory: Any, request: Request, others: bool) -> bool:
        rest = len(request.tokens) - request.done
        ok, _ = memory.check_prefill(
            extend_input_len=rest,
            total_tokens=rest + request.new_tokens + P,
            max_new_tokens=request.new_tokens - len(request.output_ids),
            input_tokens=len(request.tokens),
            swa_host_hit_length=0,
            chunk_limit=None,
        )
        if ok:
            memory.reserve(rest, request.new_tokens)
        assert ok or others or self.decoding or self.prefilling or self.pending, "a request fits nowhere"
        return ok

    def _decode(self) -> bool:
        if not self.decoding:
            return False
        while len(self.decoding) > 1 and (
            not self.allocator.check_decode_capacity(
                num_tokens=sum(P for r in self.decoding if r.done % P == 0),
                tree_cache=self.tree,
                requests=cast("Any", self.decoding),
            )
            or self.random.random() < self.retract_share
        ):
            if self.pending:
                self._process()
                continue
            self._retract(self.decoding.pop())
        if not self.decoding:
            return True
        batch = list(self.decoding)
        for request in batch:
            request.tokens.append(self.random.randrange(1000))
            request.output_ids.append(request.tokens[-1])
        self._launch(batch, [len(r.tokens) for r in batch], decode=True)
        for request in batch:
            if len(request.output_ids) >= request.new_tokens or self.random.random() < self.cancel_share:
                self.decoding.remove(request)
        return True

    def _retract(self, request: Request) -> None:
        self._release(request, checkpoint=False)
        request.retraction_count += 1
        request.kv = SimpleNamespace(kv_committed_len=0)
        request.row, request.done, request.owned = [], 0, 0
        self.waiting.insert(0, request)

    # ---- launch: allocate, then the forward ----------------------------------------------------------------

    def _launch(self, batch: list[Request], ends: list[int], *, decode: bool) -> None:
        allocator, lens = self.allocator, torch.tensor(ends)
        allocator.prepare(self._batch(batch, decode=decode, ends=ends))
        last = torch.tensor([self._slot(r, r.done - 1) if r.done else -1 for r in batch])
        if decode:
            out = allocator.alloc_decode(lens, lens, last)
        else:
            starts = torch.tensor([r.done for r in batch])
            out = allocator.alloc_extend(starts, starts, lens, lens, last, int((lens - starts).sum()))
        assert out is not None, f"out of memory: {allocator.evidence.pool_line()}"
        spans, at = [], 0
        for request, end in zip(batch, ends, strict=True):
            count = end - request.done
            for i, slot in enumerate(out[at : at + count].tolist()):
                position = request.done + i
                assert slot % P == position % P
                if position % P == 0:
                    request.row.append(slot // P)
                assert request.row[position // P] == slot // P
            spans.append((request.done, end))
            at += count
        self._forward(batch, spans, out, decode=decode)
        for request, end in zip(batch, ends, strict=True):
            request.done = request.kv.kv_committed_len = end
        self.pending.append([(decode, request, end) for request, end in zip(batch, ends, strict=True)])

    def _slot(self, request: Request, position: int) -> int:
        return request.row[position // P] * P + position % P

    # ---- results -------------------------------------------------------------------------------------------

    def _flat(self) -> list[Any]:
        return [entry for step in self.pending for entry in step]

    def _process(self) -> None:
        while self.pending:
            self._process_one()

    def _process_one(self) -> None:
        for decode, request, end in self.pending.pop(0):
            if not request.running:
                continue
            active = request in self.decoding or request is self.prefilling
            if not active and not any(request is other for _, other, _ in self._flat()):
                self._release(request, checkpoint=True)
                self.finished.append(request)
            elif not decode:
                self.tree.insert(request, end)

    def _release(self, request: Request, *, checkpoint: bool) -> None:
        """As release_kv_cache: checkpoint, end of residency, free the private tail, unlock."""
        if checkpoint:
            self.tree.insert(request, request.done)
        self.allocator.evidence.note_end(self.allocator.residency.requests.get(id(request.kv)))
        self.allocator.residency.close(request.kv)
        if request.row[request.owned :]:
            self.allocator.free_page_ids(torch.tensor(request.row[request.owned :]))
        self.tree.unlock(request)
        request.running = False
