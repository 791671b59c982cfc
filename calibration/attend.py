"""Attention as deployed: each KV head with its own sinks and window, block by block, in linear memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvir.calibration.candidates import FULL, Candidate
from kvir.calibration.interface import AttentionCall, capped

QUERY_BLOCK = 256


def attend(call: AttentionCall, kept: Sequence[Candidate]) -> Tensor:
    """Outputs [T, Hq, Dv] in the dtype of the query; `kept` has one entry per KV head."""
    kv_heads, group = len(kept), call.group
    out = call.query.new_empty(call.query.shape[1], call.query.shape[0], call.value.shape[-1])
    for candidate in dict.fromkeys(kept):
        heads = [head for head in range(kv_heads) if kept[head] == candidate]
        rows = torch.tensor([head * group + i for head in heads for i in range(group)], device=out.device)
        some = AttentionCall(
            call.layer_id,
            call.query[rows],
            call.key[heads],
            call.value[heads],
            call.scale,
            call.softcap,
            None if call.learned_sinks is None else call.learned_sinks[rows],
        )
        out[:, rows] = _attend_equal(some, candidate).transpose(0, 1).to(out.dtype)
    return out


def attend_phases(
    call: AttentionCall, prefill: Sequence[Candidate], decode: Sequence[Candidate], prompt_tokens: int
) -> Tensor:
    """As `attend`; queries at positions below `prompt_tokens` obey the prefill phase, later ones decode."""
    before, split = call.key.shape[1] - call.query.shape[1], prompt_queries(call, prompt_tokens)
    if split == 0 or prefill == decode:
        return attend(call, decode)
    end = before + split
    early = replace(call, query=call.query[:, :split], key=call.key[:, :end], value=call.value[:, :end])
    if split == call.query.shape[1]:
        return attend(early, prefill)
    late = replace(call, query=call.query[:, split:])
    return torch.cat([attend(early, prefill), attend(late, decode)])


def prompt_queries(call: AttentionCall, prompt_tokens: int) -> int:
    """How many of the call's queries, its first ones, are at positions below `prompt_tokens`."""
    before = call.key.shape[1] - call.query.shape[1]
    return min(max(prompt_tokens - before, 0), call.query.shape[1])


def _attend_equal(call: AttentionCall, kept: Candidate) -> Tensor:
    """[Hq, T, Dv]: all heads keep the same."""
    queries, keys = call.query.shape[1], call.key.shape[1]
    plain = not call.softcap and call.learned_sinks is None
    if plain and kept == FULL and queries in (keys, 1):
        key, value = (t.repeat_interleave(call.group, 0)[None] for t in (call.key, call.value))
        return scaled_dot_product_attention(
            call.query[None], key, value, is_causal=queries > 1, scale=call.scale
        )[0]
    before = keys - queries  # keys from earlier calls
    made: list[Tensor] = []
    for start in range(0, queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, queries)
        end = before + stop
        if kept.recent_tokens is None:
            seen = torch.arange(end, device=call.key.device)
        else:
            low = max(0, before + start - kept.recent_tokens + 1)
            sinks = min(kept.sink_tokens, low)
            seen = torch.cat([torch.arange(sinks), torch.arange(low, end)]).to(call.key.device)
        positions = torch.arange(before + start, end, device=call.key.device)[:, None]
        mask = seen <= positions
        if kept.recent_tokens is not None:
            mask &= (seen > positions - kept.recent_tokens) | (seen < kept.sink_tokens)
        made.append(_attend_block(call, slice(start, stop), seen, mask))
    return torch.cat(made, 1)


def _attend_block(call: AttentionCall, block: slice, seen: Tensor, mask: Tensor) -> Tensor:
    query = call.query[:, block]
    key, value = (t[:, seen].repeat_interleave(call.group, 0) for t in (call.key, call.value))
    if not call.softcap and call.learned_sinks is None:
        return scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=call.scale
        )[0]
    logits = capped((query.float() @ key.float().transpose(1, 2)) * call.scale, call.softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if call.learned_sinks is not None:
        extra = call.learned_sinks.float()[:, None, None].expand(-1, logits.shape[1], 1)
        weights = torch.cat([logits, extra], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    return weights @ value.float()
