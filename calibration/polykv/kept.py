"""The rows that a method keeps of a prompt at several budgets: one scoring, one selection per budget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvir.calibration.interface import AttentionCall
from kvir.calibration.parts import Parts
from kvir.calibration.polykv.methods import Method
from kvir.calibration.polykv.visible import after_selection, in_window
from kvir.kernels.ref.prompt_inputs import prompt_inputs
from kvir.kernels.ref.score import score
from kvir.kernels.ref.score_needs import needs
from kvir.kernels.ref.select import select_top_k
from kvir.kernels.ref.select_budget import Lengths, group_take
from kvir.kernels.score_ops import Rope, ScoreInputs, UnitScores
from kvir.policy_ir.scores import Score


@dataclass(frozen=True)
class Model:
    """What scores read of a model beside queries, keys and values."""

    parts: Mapping[int, Parts]
    ropes: Mapping[int, Rope]
    index: Mapping[int, int]  # layer_id -> place among the layers with a KV cache

    def inputs(self, call: AttentionCall, prompt_tokens: int, scores: Iterable[Score]) -> ScoreInputs:
        """Of the prompt of a call that holds all its queries."""
        query = call.query[:, :prompt_tokens].transpose(0, 1)
        weight = self.parts[call.layer_id].output.weight.detach()
        return prompt_inputs(
            scores,
            query,
            call.key[:, :prompt_tokens].transpose(0, 1),
            call.value[:, :prompt_tokens].transpose(0, 1),
            scale=call.scale,
            logit_cap=call.softcap or 0.0,
            layer=self.index[call.layer_id],
            w_o=weight.T.unflatten(0, (query.shape[1], -1)),
            rope=self.ropes.get(call.layer_id),
        )


def visible(
    method: Method,
    inputs: ScoreInputs | None,
    budgets: Sequence[int],
    positions: Tensor,
    rows: int,
    kv_heads: int,
) -> list[Tensor]:
    """bool [Hkv, Q, N] per budget of rows of the prompt; `inputs` are those of the prompt."""
    if method.term is None:
        windows = [max(1, budget - method.sink_tokens) for budget in budgets]
        masks = [in_window(method.sink_tokens, window, positions, rows) for window in windows]
        return [mask.expand(kv_heads, *mask.shape) for mask in masks]
    assert inputs is not None
    return [after_selection(mask, positions, rows) for mask in kept_rows(method, inputs, budgets)]


def kept_rows(method: Method, inputs: ScoreInputs, budgets: Sequence[int]) -> list[Tensor]:
    """bool [Hkv, P] per budget: what the method's rule keeps of the whole prompt.

    `budgets` count all rows that stay of a head, or on average where heads compete.
    """
    term = method.term
    assert term is not None
    rows, kv_heads = inputs.k.shape[:2]
    start = min(rows, method.sink_tokens)
    stop = max(start, rows - method.recent_tokens)
    lengths = Lengths(rows, rows, method.inside_rows, stop - start)
    inputs = replace(inputs, candidates=(start, stop), inside_rows=method.inside_rows)
    changes = "budget_rows" in needs(term.by)
    scores: Tensor | None = None
    heads = list(range(kv_heads))
    rivals = term.scope == "layer"
    groups = [heads] if rivals or term.tie else [[head] for head in heads]
    made: list[Tensor] = []
    for budget in budgets:
        free = max(0, budget - method.inside_rows)
        if scores is None or changes:
            inputs = replace(inputs, budget_rows=min(free, lengths.candidates))
            scores = score(term.by, inputs, term.precision)
        units = [UnitScores(inputs.layer, head, scores[head], (start, stop)) for head in heads]
        mask = torch.ones(kv_heads, rows, dtype=torch.bool)
        mask[:, start:stop] = False
        for group in groups:
            if rivals:
                take = group_take(term, lengths, [free] * len(group), len(group))
            else:  # tied heads of equal budgets make equal choices
                own = group_take(term, lengths, [free], 1)
                take = replace(own, rows=own.rows * len(group))
            found = select_top_k(
                [units[head] for head in group],
                take,
                ties=[list(range(len(group)))] if term.tie else [],
                tie_reduce=term.tie_reduce,
                block=term.block,
                on_equal=term.on_equal,
            )
            for head, chosen in zip(group, found, strict=True):
                mask[head, chosen] = True
        made.append(mask)
    return made
