"""Queries, keys and values of a real model on one prompt, and everything that scores may ask about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvir.kernels.ref.prompt_inputs import prompt_inputs
from kvir.kernels.score_ops import Rope, ScoreInputs
from kvir.policy_ir.scores import Score

CHUNK = 200  # queries that statistics get at a time; no divisor of anything


@dataclass(frozen=True)
class LayerCapture:
    """One layer: q [n, Hq, D], k, v [n, Hkv, D] with rotation, W_O [Hq, D, hidden]."""

    index: int
    q: Tensor
    k: Tensor
    v: Tensor
    w_o: Tensor
    rope: Rope
    scale: float

    def inputs(self, scores: Sequence[Score]) -> ScoreInputs:
        """What the scores need, and nothing else."""
        return prompt_inputs(
            scores,
            self.q,
            self.k,
            self.v,
            scale=self.scale,
            layer=self.index,
            w_o=self.w_o,
            rope=self.rope,
            chunk=CHUNK,
        )


@torch.no_grad()
def capture(model_path: Path, ids: Sequence[int], *, future: int = 512) -> list[LayerCapture]:
    """One forward pass in float32; rotation tables reach `future` positions beyond the prompt."""
    seen: list[tuple[Tensor, Tensor, Tensor, float]] = []

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **more: Any) -> tuple:
        scale = more["scaling"]
        seen.append((query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scale))
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("kvir_capture", attend)
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="kvir_capture"
    ).eval()
    model.model(torch.tensor([list(ids)]), use_cache=False)
    head_dim = seen[0][0].shape[2]
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(len(ids) + future)[None])
    rope = Rope(cos[0, :, : head_dim // 2], sin[0, :, : head_dim // 2])
    return [
        LayerCapture(index, q, k, v, _blocks(layer.self_attn.o_proj.weight, q.shape[1]), rope, scale)
        for index, ((q, k, v, scale), layer) in enumerate(zip(seen, model.model.layers, strict=True))
    ]


def _blocks(weight: Tensor, query_heads: int) -> Tensor:
    """The output projection [hidden, Hq D] as [Hq, D, hidden]."""
    return weight.detach().T.unflatten(0, (query_heads, -1))
