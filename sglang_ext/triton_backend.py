"""The attention backend with Triton kernels: decode from static memory, fit for CUDA graphs.

SGLang calls, for every decode step, `init_forward_metadata_out_graph` on the host and then either replays a
graph, in which `init_forward_metadata_in_graph` and every layer's `forward_decode` were recorded, or runs
them one by one.  What the host does is the first half alone: deltas of the table, and where compact rows are.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvir.kernels import dispatch
from kvir.kernels.triton.decoder import Decoder, Placed, Sizes
from kvir.kernels.triton.ops import launch_extend, tile_of_decode
from kvir.lowering.course import most_compact_pages
from kvir.lowering.footprint import ceil_div
from kvir.lowering.triggers import device_selections
from kvir.sglang_ext.backend import KvirAttentionBackend, host_lens
from kvir.sglang_ext.graphs import host_selects
from kvir.sglang_ext.triggers import DeviceTriggers
from kvir.sglang_ext.whole_prefill import WholePrefill

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


logger = logging.getLogger(__name__)


class KvirTritonBackend(KvirAttentionBackend):
    """Prefill as in the base class; decode by `kernels.triton.decoder`."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        # prefill counts what is missing where decode does, and waits for nothing
        self.kernels = replace(dispatch.get("triton"), attend_extend=self._attend_extend)
        self.pool.kernels_name = self.kernels.name
        self._whole = WholePrefill.of(self.pool)
        self.pool.flashinfer_layers = 0 if self._whole is None else len(self._whole.layers)
        self._decoder = self._make_decoder(self.req_to_token.shape[0])
        self._holes = HoleWatch(self._decoder.holes)
        bounds = self.pool.decode_bounds
        self._recent = bounds.recent.cpu().numpy()
        self._triggers = self._make_triggers()
        self.pool.selects_on_device = self._triggers is not None
        self._batch: tuple[torch.Tensor, ...] = ()  # of the step: rows of the requests, and their lengths

    def _make_decoder(self, batch: int) -> Decoder:
        layout = self.pool.own
        q = torch.empty((1, layout.query_heads, layout.head_dim), dtype=self.pool.kv.dtype)
        sizes = Sizes(
            batch=batch,
            pages=ceil_div(self.req_to_token.shape[1], self.page_tokens),
            spare_pages=max((most_compact_pages(layout, c) for c in layout.compact), default=0),
            layers=len(self.pool.plan.model.layers),
            kv_heads=self.kv_heads,
            query_heads=layout.query_heads,
            head_dim=self.head_dim,
            page_rows=self.page_tokens,
        )
        tile = tile_of_decode(q.to(self.pool.kv.device), self.kv_heads)
        return Decoder(sizes, tile, self.pool.decode_bounds, self.pool.kv.device)

    def _make_triggers(self) -> DeviceTriggers | None:
        """Selections of decode on the device, if all of the plan's can be."""
        reason = host_selects(self.pool.plan, self.pool.residency.geometry.ranks.count)
        if reason is not None:
            logger.info("kvir: selections of decode run layer by layer, outside of graphs: %s", reason)
            return None
        selections = device_selections(self.pool.plan.layout)
        if self.selection is None or not selections.nuclei:
            return None
        self.selection.leave_decode()
        return DeviceTriggers(selections, self.pool, self._decoder, self.req_to_token.shape[0])

    # ---- once per forward ----------------------------------------------------------------------------------

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory is there since the start, for as many requests as can run."""
        if max_bs > self._decoder.sizes.batch:
            raise RuntimeError(f"kvir: graphs of {max_bs} requests, {self._decoder.sizes.batch} can run")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 0  # a row of padding sees nothing

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if not forward_batch.forward_mode.is_decode():
            self._holes.look()
            super().init_forward_metadata(forward_batch)
            if self._triggers is not None:
                starts, counts = forward_batch.extend_prefix_lens_cpu, forward_batch.extend_seq_lens_cpu
                assert starts is not None
                assert counts is not None
                self._triggers.begin_extend(forward_batch.req_pool_indices, starts, counts)
            return
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> None:
        """The host's half of a step."""
        self._holes.look()
        if in_capture:
            self._decoder.place([])
            self._works = []
            return
        self.update_table()
        if self.selection is None:
            return
        lens = host_lens(forward_batch)
        works = self.selection.of_decode(self.allocator, lens)
        self._decoder.place(self._placed(lens))
        self._works = works if self._triggers is None else []
        if self._triggers is not None:
            self._triggers.place(works)

    def after_forward(self) -> None:
        """What a trigger chose on the device is read; a graph that was replayed has not done so."""
        if self._triggers is not None:
            self._triggers.settle()

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """The device's half: recorded in a graph, or run as it is."""
        self._batch = forward_batch.req_pool_indices, forward_batch.seq_lens
        self._decoder.plan(self.req_to_token, forward_batch.req_pool_indices, forward_batch.seq_lens)

    def _placed(self, lens: list[int]) -> list[Placed | None]:
        """Of each request whose rows were compacted, where they are and what its units see."""
        found: list[Placed | None] = []
        for state, tokens in zip(self.allocator.decoding, lens, strict=False):  # lens may be padded
            if state.compact is None:
                found.append(None)
                continue
            _, sink, recent = state.compact.decode_view(tokens, self._recent)
            rows = np.asarray(state.compact.spare_rows)
            found.append(Placed(*(torch.from_numpy(x.astype(np.int32)) for x in (rows, sink, recent))))
        return found

    # ---- once per layer ------------------------------------------------------------------------------------

    def _after_extend(self, q: torch.Tensor, index: int) -> None:
        super()._after_extend(q, index)
        if self._triggers is not None:
            self._triggers.remember_chunk(index, q)

    def _after_decode(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention) -> None:
        if self._triggers is None:
            super()._after_decode(q, k, v, layer)
            return
        index, (rows, lens) = self.layer_index[layer.layer_id], self._batch
        self._triggers.remember(index, q, rows, lens)
        if index == len(self.layer_index) - 1:  # every layer's queries and rows are there
            self._triggers.select(self.pool.cache, rows, layer.scaling, layer.logit_cap)

    def _attend_decode(self, q: torch.Tensor, layer: RadixAttention, unit0: int, out: torch.Tensor) -> int:
        index = self.layer_index[layer.layer_id]
        self._decoder.attend(index, q, self.pool.cache, layer.scaling, layer.logit_cap, out)
        return 0  # counted on the device

    def _attend_extend(self, *arguments: Any) -> int:
        whole, layer = self._whole, arguments[8] // self.kv_heads
        compute = launch_extend if whole is None or layer not in whole.layers else whole.prefill
        compute(*arguments, holes=self._decoder.holes)
        return 0

    def _checked(self, out: torch.Tensor, holes: int, layer: RadixAttention) -> torch.Tensor:
        if self.debug:
            self._holes.look()
        return super()._checked(out, holes, layer)


class HoleWatch:
    """Reads a counter on the device without waiting for it: what it says on a GPU is a step old."""

    def __init__(self, counter: torch.Tensor) -> None:
        self._counter = counter
        self._seen = torch.zeros_like(counter, device="cpu", pin_memory=counter.is_cuda)
        self._copied = torch.cuda.Event() if counter.is_cuda else None

    def look(self) -> None:
        """Raises RuntimeError if rows were missing."""
        if self._copied is None:
            missing = int(self._counter)
        elif torch.cuda.is_current_stream_capturing() or not self._copied.query():
            return
        else:
            missing = int(self._seen)
            self._seen.copy_(self._counter, non_blocking=True)
            self._copied.record()
        if missing:
            raise RuntimeError(f"kvir: {missing} rows were needed that are not resident")
