"""What some scores need of the model beside q, k and v: the output projection, and the rotation of positions.

Found in the modules that SGLang has loaded, by what they are: the attention module is the one that holds a
`RadixAttention`, its output projection the one `RowParallelLinear` beside it, its rotation the module with a
`cos_sin_cache`.  The projection is read by projecting unit vectors, so it may be quantised or packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from sglang.srt.layers.linear import RowParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention

from kvir.kernels.ref.score_values import gram
from kvir.kernels.score_ops import Need, Rope


class ModelParts:
    """The parts of every attention layer, by SGLang's `layer_id`."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._attention: dict[int, torch.nn.Module] = {}
        for module in model.modules():
            for child in module.children():
                if isinstance(child, RadixAttention):
                    self._attention[child.layer_id] = module
        self._grams: dict[int, torch.Tensor] = {}

    def check(self, layer_id: int, needs: frozenset[Need]) -> None:
        """Raises RuntimeError if a layer has not what scores need of it."""
        if needs & {"projected_l1", "projected_l2"}:
            self._projection(layer_id)
        if "rope" in needs:
            self.rope(layer_id)

    @torch.no_grad()
    def w_o(self, layer_id: int) -> torch.Tensor:
        """float32 [Hq, D, hidden], computed anew at each call: it is as large as the weights."""
        projection = self._projection(layer_id)
        heads = self._radix(layer_id)
        size = heads.tp_q_head_num * heads.v_head_dim
        dtype = getattr(projection, "params_dtype", torch.float32)
        where = next(projection.parameters()).device
        origin = _out(projection(torch.zeros(1, size, dtype=dtype, device=where))).float()
        rows = _out(projection(torch.eye(size, dtype=dtype, device=where))).float() - origin
        return rows.view(heads.tp_q_head_num, heads.v_head_dim, -1)

    def gram(self, layer_id: int) -> torch.Tensor:
        """float32 [Hq, D, D], W_O W_O' of each query head; computed once."""
        if layer_id not in self._grams:
            self._grams[layer_id] = gram(self.w_o(layer_id))
        return self._grams[layer_id]

    def rope(self, layer_id: int) -> Rope:
        """The rotation of a layer's queries and keys."""
        for module in self._attention[layer_id].children():
            tables: Any = getattr(module, "cos_sin_cache", None)
            if tables is not None:
                cos, sin = tables.float().chunk(2, dim=-1)
                return Rope(cos, sin, interleaved=not getattr(module, "is_neox_style", True))
        raise RuntimeError(
            f"kvir: layer {layer_id} has no table of rotations, which a score of the plan needs"
        )

    def _projection(self, layer_id: int) -> torch.nn.Module:
        found = [m for m in self._attention[layer_id].children() if isinstance(m, RowParallelLinear)]
        if len(found) != 1:
            raise RuntimeError(
                f"kvir: layer {layer_id} has {len(found)} output projections, a score of the plan needs one"
            )
        return found[0]

    def _radix(self, layer_id: int) -> Any:
        return next(m for m in self._attention[layer_id].children() if isinstance(m, RadixAttention))


def needed(model: torch.nn.Module, by_layer: Mapping[int, frozenset[Need]]) -> ModelParts:
    """The parts of a model, checked to have what scores need in each layer (`layer_id` -> needs)."""
    parts = ModelParts(model)
    for layer_id, needs in by_layer.items():
        parts.check(layer_id, needs)
    return parts


def _out(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result
