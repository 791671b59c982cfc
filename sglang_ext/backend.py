"""The attention backend: brings the device table up to date, then reads and writes through it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType

from kvir.kernels import dispatch
from kvir.kernels.catalog import CATALOG
from kvir.kernels.ops import Bounds
from kvir.lowering.stages import ExecutionPlan
from kvir.sglang_ext.allocator import KvirAllocator
from kvir.sglang_ext.pool import KvirPool
from kvir.sglang_ext.ranks import Exchange
from kvir.sglang_ext.selecting import LayerCall, RowSelection, Work

T = TypeVar("T")

KERNELS_VARIABLE = "KVIR_KERNELS"

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def kernels_of(plan: ExecutionPlan, op: str = "attend_decode") -> str:
    """The kernels for an op, empty if the plan has none: the best of the plan's, or the variable's."""
    chosen = {choice.implementation for choice in plan.choices if choice.op == op}
    best = next((each.name for each in CATALOG[op] if each.name in chosen), "")
    named = os.environ.get(KERNELS_VARIABLE)
    # FlashInfer does part of a prefill (`whole_prefill`), Triton the rest
    return "triton" if named == "flashinfer" else named or best


class KvirAttentionBackend(AttentionBackend):
    """Decode and extend through the residency table; one kernel call per layer and op."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        pool = runner.token_to_kv_pool
        if not isinstance(pool, KvirPool):
            raise RuntimeError(
                f"kvir: the KV pool is a {type(pool).__name__}; the hook that builds it did not bind"
            )
        self.pool = pool
        allocator, rows = runner.token_to_kv_pool_allocator, runner.req_to_token_pool
        if not isinstance(allocator, KvirAllocator) or rows is None:
            raise RuntimeError("kvir: the allocator is not ours; the hook that builds it did not bind")
        self.debug = allocator.debug
        self.req_to_token = rows.req_to_token
        self.page_tokens = pool.page_size
        self.kv_heads = pool.own.kv_heads
        self.first_head = pool.residency.geometry.own_heads.start
        self.head_dim = pool.own.head_dim
        self.layer_index = {layer.layer_id: i for i, layer in enumerate(pool.plan.model.layers)}
        self.kernels = dispatch.choose(kernels_of(pool.plan))
        pool.kernels_name = self.kernels.name
        self._pages = torch.empty((0, 0), dtype=torch.int32)
        self._lens = torch.empty(0, dtype=torch.int32)
        self._extends = self._lens
        self._bounds = pool.decode_bounds
        self.allocator = allocator
        self.selection = None
        if pool.plan.layout.compact:
            pool.sums_name = (sums := dispatch.sums(kernels_of(pool.plan, "sum"))).name
            pool.copies_name = (copies := dispatch.copies(kernels_of(pool.plan, "compact"))).name
            exchange = Exchange.of(pool.residency.geometry.ranks)
            self.selection = RowSelection(pool, runner.model, exchange, sums, copies)
        self._works: list[Work] = []

    # ---- once per forward ----------------------------------------------------------------------------------

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        pool = self.pool
        shadows = self.update_table()
        rows = forward_batch.req_pool_indices
        if forward_batch.forward_mode.is_decode():
            lens = host_lens(forward_batch)
            self._lens = forward_batch.seq_lens.to(torch.int32)
            self._pages = self._logical_pages(rows, max(lens))
            if self.selection is not None:
                self._works = self.selection.of_decode(self.allocator, lens)
                self._read_compact(lens)
            return
        self._lens = _given(forward_batch.extend_prefix_lens).to(torch.int32)
        self._extends = _given(forward_batch.extend_seq_lens).to(torch.int32)
        prefix_lens = _given(forward_batch.extend_prefix_lens_cpu)
        self._pages = self._logical_pages(rows, max(prefix_lens, default=0))
        for position in shadows:
            # the page that the prefix ends in is rewritten by this very forward: read its old row
            self._pages[position, prefix_lens[position] // self.page_tokens] = pool.shadow_base + position
        if self.selection is not None:
            lens = _given(forward_batch.extend_seq_lens_cpu)
            self._works = self.selection.of_extend(self.allocator, prefix_lens, lens)

    def update_table(self) -> list[int]:
        """Bring the device's table up to date; returns the batch positions whose partial page is a shadow."""
        shadows = self.pool.residency.deltas.apply(self.pool.table, self.pool.shadow_base)
        if self.debug:
            self._poison()
        return shadows

    def _read_compact(self, lens: list[int]) -> None:
        """Requests whose prompt was compacted read their spare rows first, each unit within bounds of its
        own.  Lengths of a padded batch end in some that are no request's.
        """
        compacts = [state.compact for state in self.allocator.decoding]
        if all(compact is None for compact in compacts):
            self._bounds = self.pool.decode_bounds
            return
        compacts += [None] * (len(lens) - len(compacts))
        sink, recent = self.pool.decode_bounds.sink.numpy(), self.pool.decode_bounds.recent.numpy()
        pages, sinks, recents = [], [], []
        for i, compact in enumerate(compacts):
            before, of_sink, of_recent = 0, sink, recent
            row = self._pages[i].numpy()
            if compact is not None:
                before, of_sink, of_recent = compact.decode_view(lens[i], recent)
                row = np.concatenate([compact.spare_rows, row])
            lens[i] += before
            pages.append(row)
            sinks.append(of_sink)
            recents.append(of_recent)
        width = max(len(row) for row in pages)
        padded = np.stack([np.pad(row, (0, width - len(row))) for row in pages])
        self._pages = torch.from_numpy(padded.astype(np.int32))
        self._lens = torch.tensor(lens, dtype=torch.int32)
        self._bounds = Bounds(
            sink=torch.from_numpy(np.stack(sinks).astype(np.int32)),
            recent=torch.from_numpy(np.stack(recents).astype(np.int32)),
        )

    def _logical_pages(self, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        """int32 [B, pages]: the logical page of every P tokens of each request."""
        span = max(tokens, 1)
        return (
            (self.req_to_token[rows, : span : self.page_tokens] // self.page_tokens)
            .to(torch.int32)
            .contiguous()
        )

    def _poison(self) -> None:
        freed = self.pool.residency.pool.take_freed_log(self.pool.residency.geometry.ranks.rank)
        if len(freed):
            self.pool.kv[torch.from_numpy(freed.astype(np.int64))] = float("nan")

    # ---- once per layer ------------------------------------------------------------------------------------

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        q, k, v = self._views(q, k, v, layer, save_kv_cache, kwargs)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        index = self.layer_index[layer.layer_id]
        unit0 = index * self.kv_heads
        call = LayerCall(index, layer.layer_id, q, k, v, layer.scaling, layer.logit_cap)
        selection = self.selection
        apart = [] if selection is None else [selection.heads_in_blocks(w, index) for w in self._works]
        if any(apart):
            holes = self._extend_apart(call, apart, out)
        else:
            holes = self.kernels.attend_extend(
                q, k, v, self.pool.cache, self._pages, self._lens, self._extends, self.pool.prefill_bounds,
                unit0, layer.scaling, layer.logit_cap, out,
            )  # fmt: skip
        if self.selection is not None:
            self.selection.observe(self._works, call)
        # after all reads of the layer: quarantined head-pages may be reused here
        self.kernels.append(k, v, self.pool.cache, forward_batch.out_cache_loc, unit0)
        self._after_extend(q, index)
        return self._checked(out, holes, layer)

    def _extend_apart(self, call: LayerCall, apart: list[list[int]], out: torch.Tensor) -> int:
        """Request by request: heads that select after blocks of the prompt attend by themselves."""
        assert self.selection is not None
        holes, unit0 = 0, call.index * self.kv_heads
        for i, (work, heads) in enumerate(zip(self._works, apart, strict=True)):
            bounds, one, rows = self.pool.prefill_bounds, slice(i, i + 1), slice(work.begin, work.end)
            if heads:  # the kernel must not look for their rows among the dense pages
                bounds = Bounds(bounds.sink.clone(), bounds.recent.clone())
                units = [unit0 + head - self.first_head for head in heads]
                bounds.sink[units], bounds.recent[units] = 0, 1
            holes += self.kernels.attend_extend(
                call.q[rows], call.k[rows], call.v[rows], self.pool.cache, self._pages[one], self._lens[one],
                self._extends[one], bounds, unit0, call.scale, call.logit_cap, out[rows],
            )  # fmt: skip
            if heads:
                self.selection.attend_blocks(work, call, out)
        return holes

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        q, k, v = self._views(q, k, v, layer, save_kv_cache, kwargs)
        return self.decode_layer(q, k, v, layer, forward_batch.out_cache_loc)

    def decode_layer(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, slots: torch.Tensor
    ) -> torch.Tensor:
        """One layer of a decode step; q, k, v [B, heads, D], slots [B]; returns [B, Hq * D]."""
        unit0 = self.layer_index[layer.layer_id] * self.kv_heads
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.kernels.append(k, v, self.pool.cache, slots, unit0)
        holes = self._attend_decode(q, layer, unit0, out)
        self._after_decode(q, k, v, layer)
        return self._checked(out, holes, layer)

    def _attend_decode(self, q: torch.Tensor, layer: RadixAttention, unit0: int, out: torch.Tensor) -> int:
        """Attention of one decode step, written to out; the number of holes."""
        return self.kernels.attend_decode(
            q, self.pool.cache, self._pages, self._lens, self._bounds, unit0, self.kv_heads,
            layer.scaling, layer.logit_cap, out,
        )  # fmt: skip

    def _after_extend(self, q: torch.Tensor, index: int) -> None:
        """Selections of a prefill that end in a layer; q [T, Hq, D]."""
        if self.selection is not None:
            self.selection.after_append(self._works, index)

    def _after_decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention) -> None:
        """Selections of a decode step: every row is in the pool."""
        if not self._works:
            return
        assert self.selection is not None
        index = self.layer_index[layer.layer_id]
        self.selection.observe(
            self._works, LayerCall(index, layer.layer_id, q, k, v, layer.scaling, layer.logit_cap)
        )
        self.selection.after_append(self._works, index)

    def _views(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: RadixAttention,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, heads, D] views; what kvir does not compute is refused here."""
        if k is None or v is None or not save_kv_cache or kwargs or layer.attn_type != AttentionType.DECODER:
            self._unsupported(layer, kwargs)
        return (
            q.view(q.shape[0], -1, self.head_dim),
            k.view(k.shape[0], self.kv_heads, self.head_dim),
            v.view(v.shape[0], self.kv_heads, self.head_dim),
        )

    def _unsupported(self, layer: RadixAttention, kwargs: dict[str, Any]) -> NoReturn:
        raise NotImplementedError(
            f"kvir: layer {layer.layer_id} asks for attention that kvir does not compute "
            f"(type {layer.attn_type}, extra arguments {sorted(kwargs)})"
        )

    def _checked(self, out: torch.Tensor, holes: int, layer: RadixAttention) -> torch.Tensor:
        if holes:
            raise RuntimeError(f"kvir: layer {layer.layer_id} needed {holes} rows that are not resident")
        if self.debug and torch.isnan(out).any():
            raise RuntimeError(f"kvir: layer {layer.layer_id} read a freed head-page")
        return out.view(out.shape[0], -1)

    # ---- what SGLang asks of a backend ---------------------------------------------------------------------

    def support_triton(self) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]  base says "True"
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


def host_lens(forward_batch: ForwardBatch) -> list[int]:
    """Lengths of a decode batch; one that a CPU pads to a compiled size has its tensor of them alone."""
    lens = forward_batch.seq_lens_cpu
    return (forward_batch.seq_lens if lens is None else lens).tolist()


def _given(value: T | None) -> T:
    """SGLang declares the fields of a batch optional; those of its mode are always there."""
    assert value is not None
    return value
