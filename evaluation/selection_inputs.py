"""What scores read of one layer in transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kvir.kernels.ref.prompt_inputs import of_query_heads, prompt_inputs
from kvir.kernels.ref.score_needs import term_scores
from kvir.kernels.score_ops import Rope, ScoreInputs
from kvir.policy_ir.nodes import Rule


def inputs_of(
    rule: Rule,
    module: Any,
    layer: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Mapping[str, Any],
    rope: Rope | None,
) -> ScoreInputs:
    """Of all heads: every query so far, and the rows that are held."""
    return prompt_inputs(
        [score for term in rule.keep for score in term_scores(term)],
        q,
        k,
        v,
        scale=options.get("scaling") or q.shape[-1] ** -0.5,
        logit_cap=options.get("softcap") or 0.0,
        layer=layer,
        w_o=module.o_proj.weight.T.float().reshape(q.shape[1], q.shape[2], -1),
        rope=rope,
    )


def of_head(inputs: ScoreInputs, head: int, group: int, rows: Tensor, tokens: int) -> ScoreInputs:
    """Inputs of one head alone, which holds the rows at these positions, at `tokens` tokens."""
    seen = 0 if inputs.q_obs is None else inputs.q_obs.shape[0]
    return replace(
        of_query_heads(inputs, slice(head * group, (head + 1) * group)),
        k=inputs.k[:, head : head + 1],
        v=inputs.v[:, head : head + 1],
        first_head=head,
        positions=rows,
        q_positions=torch.arange(tokens - seen, tokens),
    )
