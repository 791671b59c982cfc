"""The attention backend of a CPU: the base class, and what SGLang's `--enable-torch-compile` asks of one.

SGLang then compiles the model's decode step with torch once per batch size, and pads a batch to the next
size.  Attention is one operator in the compiled step, `kvir::decode_layer`: torch traces neither the pool nor
the selections, so what runs in it is what runs without the flag.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_context import get_attn_backend

from kvir.sglang_ext.backend import KvirAttentionBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class KvirCpuBackend(KvirAttentionBackend):
    """`KvirAttentionBackend` that a compiled decode step can call."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.layers = {m.layer_id: m for m in runner.model.modules() if isinstance(m, RadixAttention)}

    def decode_layer(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, slots: torch.Tensor
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.kvir.decode_layer(q, k, v, slots, layer.layer_id)
        return super().decode_layer(q, k, v, layer, slots)

    # ---- what SGLang asks of a backend when it compiles ----------------------------------------------------

    def init_cpu_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """There is no memory of its own to make."""

    def get_cpu_graph_seq_len_fill_value(self) -> int:
        return 0  # a row of padding sees nothing

    def init_forward_metadata_capture_cpu_graph(
        self, bs: int, _tokens: int, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, *_args: Any
    ) -> None:
        """A step of no requests, only for torch to look at."""
        self.allocator.decoding = []
        self._lens = seq_lens.to(torch.int32)
        self._pages = self._logical_pages(req_pool_indices, 1)
        self._bounds, self._works = self.pool.decode_bounds, []


# ---- the operator ------------------------------------------------------------------------------------------

_LIBRARY = torch.library.Library("kvir", "FRAGMENT")
_LIBRARY.define("decode_layer(Tensor q, Tensor k, Tensor v, Tensor slots, int layer_id) -> Tensor")


def _decode_layer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, layer_id: int
) -> torch.Tensor:
    """Attention of one layer by the backend of the forward that runs; as its method `decode_layer`."""
    backend = get_attn_backend()
    assert isinstance(backend, KvirCpuBackend)
    return backend.decode_layer(q, k, v, backend.layers[layer_id], slots)


def _shape(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, layer_id: int
) -> torch.Tensor:
    del k, v, slots, layer_id
    return q.new_empty((q.shape[0], q.shape[1] * q.shape[2]))


_LIBRARY.impl("decode_layer", _decode_layer, "CPU")
torch.library.register_fake("kvir::decode_layer", _shape, lib=_LIBRARY)
