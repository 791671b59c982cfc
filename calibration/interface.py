"""One attention call of a model, as transformers' attention interface shows it: after rotary embedding and
norms, before an output gate and the output projection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionCall:
    """Legend: Hq query heads, Hkv KV heads, T queries, N keys (the last T of them are the queries' own)."""

    layer_id: int
    query: Tensor  # [Hq, T, D]
    key: Tensor  # [Hkv, N, D]
    value: Tensor  # [Hkv, N, Dv]
    scale: float
    softcap: float | None = None
    learned_sinks: Tensor | None = None  # [Hq], a logit without a value (gpt-oss)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.query.shape[0] // self.key.shape[0]


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Soft-capped logits (Gemma 2): `c * tanh(logits / c)`."""
    return logits if not softcap else torch.tanh(logits / softcap) * softcap
