"""Rows that a selection would drop, folded into rows that stay (`overflow: merge`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvir.kernels.ref.merge import merge_rows
from kvir.policy_ir.nodes import Rule
from kvir.policy_ir.rules import Merge
from kvir.sglang_ext.forwards import LayerCall
from kvir.sglang_ext.held_rows import HeldRows


def reference(rule: Rule, q: torch.Tensor | None, tokens: int, call: LayerCall) -> Reference | None:
    """What a rule's merges refer to, given the last queries [W, Hq, D] of a sequence; None: it evicts."""
    if not isinstance(rule.overflow, Merge) or q is None:
        return None
    return Reference(rule.overflow, q, tokens, call.scale, call.logit_cap)


@dataclass(frozen=True)
class Reference:
    """The queries of one layer whose attention a merge keeps."""

    spec: Merge
    q: torch.Tensor  # [R, Hq, D], the last ones, of positions up to `tokens`
    tokens: int
    scale: float
    logit_cap: float

    def apply(
        self, held: HeldRows, kept: torch.Tensor, candidates: tuple[int, int], query_heads: slice
    ) -> HeldRows:
        """The rows `kept` of one KV head, with the others in those that were candidates."""
        into = kept[(kept >= candidates[0]) & (kept < candidates[1])]
        q = self.q[-self.spec.queries :, query_heads]
        rows, where = held.k.shape[0], held.k.device
        positions = torch.arange(rows, device=where) if held.positions is None else held.positions
        bias = torch.zeros(rows, device=where) if held.bias is None else held.bias
        at = torch.arange(self.tokens - q.shape[0], self.tokens, device=where)
        k, v, bias = merge_rows(
            self.spec, held.k[:, 0], held.v[:, 0], bias, positions, kept, into,
            q, at, self.scale, self.logit_cap,
        )  # fmt: skip
        return replace(held, k=k[:, None], v=v[:, None], positions=positions[kept], bias=bias)
