"""Prefill by FlashInfer, for layers whose heads keep every row: two launches and an exact merge by LSE.

A chunk's own rows are one ragged batch, causal, as FlashInfer likes it.  The resident prefix lies in
head-pages that differ from head to head, so there a KV head of a request is a sequence of its own with one KV
head: its page list is read from the residency table on the device, its queries are the chunk's, head by head.
Host plans depend on lengths alone: one of each kind per forward serves every layer, and the layers write
their page lists into the same memory, one after another.

Windows are not for this: FlashInfer takes one per launch, and of a prefix it would need a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kvir.kernels.ops import Bounds, Cache, Kernels

WORKSPACE_BYTES = 128 << 20  # for partial results; runs follow each other, so all plans share it


def library() -> Any:
    """The package.  Raises ImportError where there is none."""
    return import_module("flashinfer")


@dataclass(frozen=True)
class Heads:
    """What a plan is made for, beside lengths."""

    query_heads: int
    kv_heads: int
    head_dim: int
    page_rows: int
    dtype: torch.dtype
    scale: float
    logit_cap: float

    @property
    def options(self) -> dict[str, Any]:
        cap = self.logit_cap if self.logit_cap > 0 else None
        return {"sm_scale": self.scale, "logits_soft_cap": cap, "q_data_type": self.dtype}


@dataclass(frozen=True)
class Lengths:
    """The batch of a forward, by the tensors that tell it; the same objects for every layer."""

    pages: Tensor
    prefix_lens: Tensor
    extend_lens: Tensor

    def same(self, other: Lengths) -> bool:
        return (
            self.pages is other.pages
            and self.prefix_lens is other.prefix_lens
            and self.extend_lens is other.extend_lens
        )


@dataclass(frozen=True)
class Prefixes:
    """The prefixes of a batch, where there are any."""

    pages: Tensor  # int64 [n], logical pages, request by request
    rows: Tensor  # int32 [n, 1], of each that the prefix covers
    tokens: Tensor | None  # int64, of the chunk's, those whose request has a prefix; None: all
    indices: Tensor  # int32 [Hkv * n], head-pages: what the plan reads


class Prefill:
    """`kernels.ops.AttendExtend` where bounds hide nothing.  Holes are counted on the device."""

    def __init__(self, device: torch.device | str, package: Any = None) -> None:
        self._package = library() if package is None else package
        self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[Heads, tuple[Any, Any]] = {}
        self._planned: dict[Heads, tuple[Lengths, Prefixes | None]] = {}

    def __call__(
        self,
        q: Tensor,
        k_new: Tensor,
        v_new: Tensor,
        cache: Cache,
        pages: Tensor,
        prefix_lens: Tensor,
        extend_lens: Tensor,
        bounds: Bounds,
        unit0: int,
        scale: float,
        logit_cap: float,
        out: Tensor,
        holes: Tensor,
    ) -> None:
        """As in `AttendExtend`, for units that the bounds hide nothing from; holes: int32 [1], added to."""
        del bounds
        kv_heads = k_new.shape[1]
        heads = Heads(q.shape[1], kv_heads, q.shape[2], cache.kv.shape[2], q.dtype, scale, logit_cap)
        prefixes = self._plan(heads, Lengths(pages, prefix_lens, extend_lens))
        fresh, prefix = self._wrappers[heads]
        if prefixes is None:
            fresh.run(q, k_new, v_new, out=out)
            return
        own, own_lse = fresh.run(q, k_new, v_new, return_lse=True)
        found = cache.table[prefixes.pages, unit0 : unit0 + kv_heads]  # [n, Hkv]
        holes += ((found < 0) * prefixes.rows).sum()
        prefixes.indices.copy_(found.clamp(min=0).T.reshape(-1))
        rows = slice(None) if prefixes.tokens is None else prefixes.tokens
        by_head = q[rows].unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(0, 1)  # [Hkv * T', G, D]
        k, v = cache.kv[:, 0].unsqueeze(2), cache.kv[:, 1].unsqueeze(2)
        before, before_lse = prefix.run(by_head.contiguous(), (k, v), return_lse=True)
        before = before.unflatten(0, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        before_lse = before_lse.unflatten(0, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        merged, _ = self._package.merge_state(
            own[rows].contiguous(), own_lse[rows].contiguous(), before.contiguous(), before_lse.contiguous()
        )
        if prefixes.tokens is None:
            out.copy_(merged)
        else:
            out.copy_(own)
            out[rows] = merged

    # ---- plans ---------------------------------------------------------------------------------------------

    def _plan(self, heads: Heads, lengths: Lengths) -> Prefixes | None:
        """Plans for a forward, made when its first layer asks; the host reads the lengths then."""
        if heads in self._planned and self._planned[heads][0].same(lengths):
            return self._planned[heads][1]
        if heads not in self._wrappers:
            made = self._package
            self._wrappers[heads] = (
                made.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD"),
                # of the backends this is the one that reads page lists when it runs, not when it plans
                made.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend="fa2"),
            )
        before, fresh = lengths.prefix_lens.tolist(), lengths.extend_lens.tolist()
        begins = _starts(fresh)
        self._wrappers[heads][0].plan(
            begins, begins, heads.query_heads, heads.kv_heads, heads.head_dim, causal=True, **heads.options
        )
        prefixes = self._plan_prefixes(heads, lengths, before, fresh) if any(before) else None
        self._planned[heads] = lengths, prefixes
        return prefixes

    def _plan_prefixes(self, heads: Heads, lengths: Lengths, before: list[int], fresh: list[int]) -> Prefixes:
        device, size, repeats = lengths.pages.device, heads.page_rows, heads.kv_heads
        having = [b for b, n in enumerate(before) if n]
        counts = [-(-before[b] // size) for b in having]
        pages = torch.cat([lengths.pages[b, :n] for b, n in zip(having, counts, strict=True)]).long()
        last = [(before[b] - 1) % size + 1 for b in having]
        rows = [n for count, end in zip(counts, last, strict=True) for n in (*[size] * (count - 1), end)]
        tokens = None
        if len(having) < len(before):
            begins = [0, *accumulate(fresh)]
            tokens = torch.cat([torch.arange(begins[b], begins[b + 1]) for b in having]).to(device)
        indices = torch.zeros(sum(counts) * repeats, dtype=torch.int32, device=device)
        self._wrappers[heads][1].plan(
            _starts([fresh[b] for b in having] * repeats), _starts(counts * repeats), indices,
            torch.tensor(last * repeats, dtype=torch.int32), heads.query_heads // repeats, 1, heads.head_dim,
            size, causal=False, **heads.options,
        )  # fmt: skip
        return Prefixes(pages, torch.tensor(rows, dtype=torch.int32).to(device)[:, None], tokens, indices)


def with_prefill(kernels: Kernels, prefill: Prefill) -> Kernels:
    """Kernels whose prefill is FlashInfer's, behind the contract: the host reads the holes."""

    def attend_extend(*arguments: Any) -> int:
        holes = torch.zeros(1, dtype=torch.int32, device=arguments[0].device)
        prefill(*arguments, holes=holes)
        return int(holes)

    return replace(kernels, name="flashinfer", attend_extend=attend_extend)


def _starts(lengths: list[int]) -> Tensor:
    """int32 [n + 1], on the host, where FlashInfer plans."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
