"""What a change of attention outputs does to the residual stream, KV head by KV head."""

from __future__ import annotations

import torch
from torch import Tensor

from kvir.calibration.parts import Parts


class Contribution:
    """One layer's way from attention outputs to the residual stream, linear but for a norm at its end.

    Legend: Q positions, E hidden size; the others as in `interface.AttentionCall`.
    """

    def __init__(self, part: Parts, full: Tensor, gate: Tensor | None = None) -> None:
        """`full` [Hkv, G, Q, Dv]: the outputs with full histories; `gate` [Q, Hkv, G, Dv]: what lies between
        them and the projection, elementwise."""
        kv_heads, group, _, size = full.shape
        self._gate = gate
        self._weight = part.output.weight.float().view(-1, kv_heads, group, size)
        self._after = part.after
        self.of_heads = self._projected(full)  # [Hkv, Q, E]
        bias = getattr(part.output, "bias", None)
        self._before = self.of_heads.sum(0) if bias is None else self.of_heads.sum(0) + bias.float()
        self.whole = self._before if self._after is None else self._normed(self._before)  # [Q, E]

    def moved(self, change: Tensor) -> Tensor:
        """[Hkv, Q, E]: how the residual stream changes when one KV head does, each by itself."""
        moved = self._projected(change)
        if self._after is None:
            return moved
        return self._normed(self._before + moved) - self.whole

    def moved_together(self, change: Tensor) -> Tensor:
        """[Q, E]: when the outputs of all heads change."""
        moved = self._projected(change).sum(0)
        if self._after is None:
            return moved
        return self._normed(self._before + moved) - self.whole

    def _projected(self, outputs: Tensor) -> Tensor:
        """[Hkv, G, Q, Dv] -> [Hkv, Q, E]."""
        gated = outputs.permute(2, 0, 1, 3)
        if self._gate is not None:
            gated = gated * self._gate
        return torch.einsum("qhgd,ehgd->hqe", gated, self._weight)

    def _normed(self, stream: Tensor) -> Tensor:
        assert self._after is not None
        return self._after(stream.to(self._after.weight.dtype)).float()
