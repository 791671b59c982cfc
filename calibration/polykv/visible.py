"""Which rows the queries after a prompt see, once a selection at the prompt's end has dropped the others.

Legend: K choices, Hkv KV heads, P prompt tokens, Q queries at positions >= P, N rows in all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvir.calibration.attend import attend
from kvir.calibration.candidates import FULL
from kvir.calibration.interface import AttentionCall, capped


def after_selection(kept: Tensor, positions: Tensor, rows: int) -> Tensor:
    """bool [..., Q, N]: the kept rows [..., P] of the prompt, and every row from the prompt's end on."""
    prompt = kept.shape[-1]
    fresh = torch.arange(prompt, rows, device=kept.device) <= positions[:, None]
    shape = (*kept.shape[:-1], len(positions))
    return torch.cat([kept[..., None, :].expand(*shape, prompt), fresh.expand(*shape, rows - prompt)], -1)


def in_window(sink_tokens: int, recent_tokens: int, positions: Tensor, rows: int) -> Tensor:
    """bool [Q, N]: the first rows, and the last ones up to the query's own."""
    keys = torch.arange(rows, device=positions.device)
    recent = keys > positions[:, None] - recent_tokens
    return (keys <= positions[:, None]) & (recent | (keys < sink_tokens))


def masked(call: AttentionCall, positions: Tensor, visible: Tensor) -> Tensor:
    """float32 [Hkv, G, Q, Dv]: outputs of the queries at `positions`, each seeing what `visible` [Hkv, Q, N]
    says.  `call` holds the queries of its last tokens."""
    return next(iter(masked_each(call, positions, [visible])))


def masked_each(call: AttentionCall, positions: Tensor, masks: Sequence[Tensor]) -> list[Tensor]:
    """The same for several masks; logits are computed once."""
    kv_heads, rows, value_size = call.value.shape
    before = rows - call.query.shape[1]
    query = call.query[:, positions - before].float().view(kv_heads, call.group, len(positions), -1)
    logits = torch.einsum("hgqd,hnd->hgqn", query, call.key.float()) * call.scale
    logits = capped(logits, call.softcap)
    value = call.value.float()[:, None]
    made: list[Tensor] = []
    for visible in masks:
        seen = logits.masked_fill(~visible[:, None], -torch.inf)
        if call.learned_sinks is not None:
            extra = call.learned_sinks.float().view(kv_heads, call.group, 1, 1)
            seen = torch.cat([seen, extra.expand(*seen.shape[:3], 1)], -1)
        weights = seen.softmax(-1)[..., :rows]
        made.append(weights @ value)
    assert not made or made[0].shape[-1] == value_size
    return made


def attend_after(call: AttentionCall, prompt_tokens: int, visible: Tensor) -> Tensor:
    """Outputs [T, Hq, Dv]: queries of the prompt see everything, those after it what `visible` [Hkv, Q, N]
    says, Q = N - prompt_tokens."""
    rows, queries = call.key.shape[1], call.query.shape[1]
    after = torch.arange(prompt_tokens, rows, device=call.query.device)
    late = masked(call, after, visible).permute(2, 0, 1, 3).flatten(1, 2).to(call.query.dtype)
    if queries == rows - prompt_tokens:
        return late
    assert queries == rows, "the whole sequence, or what follows the prompt"
    early = AttentionCall(
        call.layer_id,
        call.query[:, :prompt_tokens],
        call.key[:, :prompt_tokens],
        call.value[:, :prompt_tokens],
        call.scale,
        call.softcap,
        call.learned_sinks,
    )
    return torch.cat([attend(early, [FULL] * call.key.shape[0]), late])
