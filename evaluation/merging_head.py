"""One KV head of the oracle whose rows are merged: its own keys, values and biases, by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvir.kernels.ref.merge import merge_rows
from kvir.policy_ir.rules import Merge


class MergingHead:
    def __init__(
        self,
        spec: Merge,
        q: Tensor,  # [T, Hq, D] of the layer
        k: Tensor,  # [T, Hkv, D]
        v: Tensor,
        head: int,
        options: Mapping[str, Any],
        decoded: int,
    ) -> None:
        group = q.shape[1] // k.shape[1]
        self._spec, self._head = spec, head
        self._q = q[:, head * group : (head + 1) * group]
        self._k, self._v = k.clone(), v.clone()
        self.bias = torch.zeros(k.shape[0])
        self._scale = options.get("scaling") or q.shape[-1] ** -0.5
        self._cap = options.get("softcap") or 0.0
        self.out = torch.empty(decoded, group, q.shape[2])

    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values as they are now, [T, Hkv, D]; only this head's are meant."""
        return self._k, self._v

    def attend(self, query: int, index: int, held: Tensor) -> None:
        """Output `index`, of one query over the rows that are held."""
        k, v = self._k[held, self._head], self._v[held, self._head]
        logits = self._q[query] @ k.T * self._scale
        if self._cap:
            logits = torch.tanh(logits / self._cap) * self._cap
        self.out[index] = (logits + self.bias[held]).softmax(-1) @ v

    def fold(self, tokens: int, rows: Tensor, kept: Tensor, candidates: tuple[int, int]) -> None:
        """A selection at `tokens` tokens keeps rows[kept]; those of the candidates (start, stop in `rows`)
        take in what goes.
        """
        into = kept[(kept >= candidates[0]) & (kept < candidates[1])]
        first, stays = max(0, tokens - self._spec.queries), rows[kept]
        k, v, bias = merge_rows(
            self._spec, self._k[rows, self._head], self._v[rows, self._head], self.bias[rows], rows, kept,
            into, self._q[first:tokens], torch.arange(first, tokens), self._scale, self._cap,
        )  # fmt: skip
        self._k[stays, self._head], self._v[stays, self._head] = k, v
        self.bias[stays] = bias
