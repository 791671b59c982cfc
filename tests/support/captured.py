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

from kvir.kernels.ref.score_expected import QueryMoments
from kvir.kernels.ref.score_needs import needs, running, skips, window
from kvir.kernels.ref.score_running import ChunkSums, ColumnSums, log_sum_exp
from kvir.kernels.score_ops import Rope, RunningScore, ScoreInputs
from kvir.policy_ir.scores import Noncausal, Persistent, Score

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
        wanted = {need for score in scores for need in needs(score)}
        width = max((window(score) for score in scores), default=0)
        sums = {spec: self.running(spec) for score in scores for spec in running(score)}
        projected = bool(wanted & {"projected_l1", "projected_l2"})
        return ScoreInputs(
            k=self.k,
            v=self.v,
            candidates=(0, self.k.shape[0]),
            scale=self.scale,
            layer=self.index,
            q_obs=self.q[-width:] if "q_obs" in wanted else None,
            running={spec: stat.sums() for spec, stat in sums.items()},
            moments={skip: self._moments(skip) for score in scores for skip in skips(score)},
            w_o=self.w_o if projected else None,
            rope=self.rope if "rope" in wanted else None,
        )

    def running(self, spec: RunningScore) -> ColumnSums | ChunkSums:
        """The running sums of a score, fed chunk by chunk."""
        n, heads = self.q.shape[:2]
        if isinstance(spec, Noncausal):
            sums: ColumnSums | ChunkSums = ChunkSums(spec, heads, self.scale)
        else:
            last = spec.history if isinstance(spec, Persistent) and spec.history is not None else n
            sums = ColumnSums(spec, heads, self.scale, first_query=max(0, n - last))
        for start in range(0, n, CHUNK):
            stop = min(start + CHUNK, n)
            q, k, positions = self.q[start:stop], self.k[:stop], torch.arange(start, stop)
            sums.update(q, log_sum_exp(q, k, positions, self.scale), k, positions)
        return sums

    def _moments(self, skip: int) -> Any:
        moments = QueryMoments(self.q.shape[1], self.q.shape[2], self.rope, skip=skip)
        for start in range(0, self.q.shape[0], CHUNK):
            stop = min(start + CHUNK, self.q.shape[0])
            moments.update(self.q[start:stop], torch.arange(start, stop))
        return moments.moments()


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
