"""The pool: one flat tensor of head-pages for all layers and heads, reachable only through the residency
table.
"""

from __future__ import annotations

import logging
from typing import NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import KVCache

from kvir.kernels.cpu.memory import pool_zeros
from kvir.kernels.ops import FULL, Bounds, Cache
from kvir.lowering.stages import ExecutionPlan, Retention
from kvir.lowering.tensor_parallel import rank_layout
from kvir.sglang_ext.geometry import Geometry
from kvir.sglang_ext.ranks import ALONE, Ranks
from kvir.sglang_ext.residency import Residency

logger = logging.getLogger(__name__)


class KvirPool(KVCache):
    """Physical memory of `physical_tokens` full-KV tokens behind `logical_tokens` logical token ids: that of
    one rank, whose layout is `own`; the residency has the books of all ranks.

    SGLang's dense getters raise: whatever would touch the pool past the residency table is a bug.
    """

    def __init__(
        self,
        plan: ExecutionPlan,
        *,
        logical_tokens: int,
        physical_tokens: int,
        shadow_rows: int,
        dtype: torch.dtype,
        device: str,
        ranks: Ranks = ALONE,
    ) -> None:
        self.own = layout = rank_layout(plan.layout, ranks.count, ranks.rank)
        page_tokens = layout.page_tokens
        geometry = Geometry(plan.layout, ranks)
        super().__init__(logical_tokens, page_tokens, dtype, geometry.layer_count, device, False)
        self.plan = plan
        self.physical_tokens = physical_tokens
        bytes_of_full = 2 * page_tokens * layout.head_dim * dtype.itemsize
        pages_of_full = physical_tokens // page_tokens * layout.unit_count
        self.head_page_bytes = layout.head_page_bytes  # with biases, where rows are merged
        self.head_page_count = pages_of_full * bytes_of_full // self.head_page_bytes
        # logical page ids run from 1 (SGLang keeps 0 for padded tokens); spare rows behind them hold shadows
        page_count = logical_tokens // page_tokens + 1
        self.shadow_base = page_count
        self.kernels_name = ""  # set by the attention backend: what really runs
        self.sums_name = ""  # the same, of sums over all queries; empty if rows are not selected
        self.copies_name = ""  # the same, of copies of the rows that stay
        self.flashinfer_layers = 0  # whose prefill is FlashInfer's; the same
        self.selects_on_device = False  # in decode; the same
        spare_rows = self._spare_rows(geometry) if geometry.selects.any() else 0
        self.residency = Residency(
            geometry,
            page_count,
            self.head_page_count,
            spare_base=page_count + shadow_rows,
            spare_count=spare_rows,
        )
        self.kv = pool_zeros((self.head_page_count, 2, page_tokens, layout.head_dim), dtype, device)
        self.bias: torch.Tensor | None = None
        if self.head_page_bytes > bytes_of_full:
            shape = self.head_page_count, page_tokens
            self.bias = torch.zeros(shape, dtype=torch.float32, device=device)
        rows = page_count + shadow_rows + spare_rows
        self.table = torch.full((rows, len(geometry.own_units)), -1, dtype=torch.int32, device=device)
        self.cache = Cache(kv=self.kv, table=self.table, bias=self.bias)
        self.prefill_bounds = _bounds(plan.budgeted.prefill, geometry.own_heads, device)
        self.decode_bounds = _bounds(plan.budgeted.decode, geometry.own_heads, device)
        self.mem_usage = self.head_page_count * self.head_page_bytes / (1 << 30)
        logger.info(
            "kvir: plan %r: %d head-pages of %d bytes = %.1f MiB, table %.1f MiB, %d logical tokens, "
            "%d classes",
            plan.policy.name,
            self.head_page_count,
            self.head_page_bytes,
            self.head_page_count * self.head_page_bytes / 2**20,
            self.table.numel() * 4 / 2**20,
            logical_tokens,
            geometry.class_count,
        )

    def _spare_rows(self, geometry: Geometry) -> int:
        """Table rows for compact pages.  A row holds a head-page of every unit at best, of one unit at worst;
        this many let an average of 16 share a row, at under a hundredth of the pool's bytes.
        """
        return min(self.head_page_count, self.head_page_count // min(16, len(geometry.own_units)) + 1024)

    def reset_residency(self) -> None:
        self.residency.reset()
        self.table.fill_(-1)

    def get_kv_size_bytes(self) -> tuple[int, int]:
        half = self.kv.numel() * self.kv.element_size() // 2
        return half, half

    def _no_dense_view(self, *_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            "kvir: the pool has no dense buffers; rows are reached through the residency table"
        )

    get_key_buffer = _no_dense_view
    get_value_buffer = _no_dense_view
    get_kv_buffer = _no_dense_view
    set_kv_buffer = _no_dense_view


def _bounds(retention: tuple[tuple[Retention, ...], ...], heads: range, device: str) -> Bounds:
    units = [layer[head] for layer in retention for head in heads]
    return Bounds(
        sink=torch.tensor([u.sink_tokens for u in units], dtype=torch.int32, device=device),
        recent=torch.tensor(
            [FULL if u.recent_tokens is None else u.recent_tokens for u in units],
            dtype=torch.int32,
            device=device,
        ),
    )
