"""Attention outputs under every candidate at once, from partial softmax sums.

Windows are nested, so the keys fall into bands by their distance from the query, one band between two
neighbouring windows.  Each band gives a partial softmax (its largest logit, the sum of exponentials, the sum
of weighted values); merging the bands from near to far gives every window and, at last, the full history.
All candidates together read each key about once.  Each band has its own largest logit, so a window whose
logits are far below the sink's loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvir.calibration.candidates import Candidate
from kvir.calibration.interface import AttentionCall, capped

QUERY_BLOCK = 32
KEY_BLOCK = 4096
ZERO_NORM = 1e-12


@dataclass(frozen=True)
class Partial:
    """A softmax over some of the keys.  Leading axes [Hkv, G, Q]."""

    top: Tensor  # [...] largest logit, -inf over no key
    mass: Tensor  # [...] sum of exp(logit - top)
    value: Tensor  # [..., Dv] sum of exp(logit - top) * v

    def merge(self, other: Partial) -> Partial:
        """The softmax over the keys of both, which share none."""
        top = torch.maximum(self.top, other.top)
        base = torch.where(top.isinf(), 0.0, top)
        mine, its = (self.top - base).exp(), (other.top - base).exp()
        return Partial(
            top,
            self.mass * mine + other.mass * its,
            self.value * mine[..., None] + other.value * its[..., None],
        )

    def where(self, condition: Tensor, other: Partial) -> Partial:
        """This where `condition` [Q] holds, else the other."""
        return Partial(
            torch.where(condition, self.top, other.top),
            torch.where(condition, self.mass, other.mass),
            torch.where(condition[:, None], self.value, other.value),
        )

    def output(self) -> Tensor:
        return self.value / self.mass[..., None]


def outputs(
    call: AttentionCall, positions: Tensor, candidates: Sequence[Candidate]
) -> Iterator[tuple[slice, Tensor]]:
    """Block by block: (which of `positions`, float32 outputs [K, Hkv, G, block, Dv]).  `positions` ascend."""
    for start in range(0, len(positions), QUERY_BLOCK):
        block = slice(start, start + QUERY_BLOCK)
        yield block, _block_outputs(call, positions[block], candidates)


def _block_outputs(call: AttentionCall, positions: Tensor, candidates: Sequence[Candidate]) -> Tensor:
    kv_heads, _, value_size = call.value.shape
    group = call.query.shape[0] // kv_heads
    query = call.query[:, positions].float().view(kv_heads, group, len(positions), -1)
    windows = sorted({c.recent_tokens for c in candidates if c.recent_tokens is not None})
    sinks = sorted({c.sink_tokens for c in candidates if c.recent_tokens is not None} - {0})
    first, last = int(positions[0]), int(positions[-1])

    def over(low: int, high: int, near: int, far: int | None) -> Partial:
        """The keys in [low, high) at a distance in [near, far)."""
        low, high = max(low, 0), min(high, last + 1)
        found = _nothing(query, value_size)
        for begin in range(low, high, KEY_BLOCK):
            end = min(begin + KEY_BLOCK, high)
            found = found.merge(_band(call, query, positions, begin, end, near, far))
        return found

    # learned sinks (gpt-oss) are a logit without a value that every softmax holds
    state = _learned_sink(call, query, value_size)
    within: dict[int, Partial] = {}
    near = 0
    for far in windows:
        state = within[far] = state.merge(over(first - far + 1, last - near + 1, near, far))
        near = far
    full = state.merge(over(0, last - near + 1, near, None)) if near <= last else state
    prefixes: dict[int, Partial] = {}
    prefix, done = _nothing(query, value_size), 0
    for sink in sinks:
        prefix = prefixes[sink] = prefix.merge(over(done, sink, 0, None))
        done = sink

    made: list[Tensor] = []
    for candidate in candidates:
        window, sink = candidate.recent_tokens, candidate.sink_tokens
        if window is None:
            made.append(full.output())
        elif not sink:
            made.append(within[window].output())
        else:
            # sinks and window meet: they are the whole history
            meet = positions - window + 1 <= sink
            made.append(full.where(meet, within[window].merge(prefixes[sink])).output())
    return torch.stack(made)


def _band(
    call: AttentionCall, query: Tensor, positions: Tensor, low: int, high: int, near: int, far: int | None
) -> Partial:
    kv_heads, group, count, size = query.shape
    key = call.key[:, low:high].float()  # [Hkv, R, D]
    logits = (query.reshape(kv_heads, group * count, size) @ key.transpose(1, 2)) * call.scale
    logits = capped(logits, call.softcap).view(kv_heads, group, count, high - low)
    distance = positions[:, None] - torch.arange(low, high, device=positions.device)
    outside = distance < near
    if far is not None:
        outside |= distance >= far
    logits.masked_fill_(outside, -torch.inf)
    top = logits.amax(-1)
    weights = logits.sub_(torch.where(top.isinf(), 0.0, top)[..., None]).exp_()
    value = call.value[:, low:high].float()
    summed = weights.view(kv_heads, group * count, -1) @ value
    return Partial(top, weights.sum(-1), summed.view(kv_heads, group, count, -1))


def _nothing(query: Tensor, value_size: int) -> Partial:
    shape = query.shape[:-1]
    return Partial(
        query.new_full(shape, -torch.inf), query.new_zeros(shape), query.new_zeros((*shape, value_size))
    )


def _learned_sink(call: AttentionCall, query: Tensor, value_size: int) -> Partial:
    nothing = _nothing(query, value_size)
    if call.learned_sinks is None:
        return nothing
    kv_heads, group = query.shape[:2]
    top = call.learned_sinks.float().view(kv_heads, group, 1).expand(nothing.top.shape)
    return Partial(top, torch.ones_like(nothing.mass), nothing.value)


def cosine(outputs: Tensor, reference: Tensor) -> Tensor:
    """Cosine over the last axis by the rules of SeqCalib: a norm of at most 1e-12 counts as zero; both zero
    gives 1, one zero gives 0."""
    dot = (outputs * reference).sum(-1)
    norms = outputs.norm(dim=-1), reference.norm(dim=-1)
    zero = norms[0] <= ZERO_NORM, norms[1] <= ZERO_NORM
    some = zero[0] | zero[1]
    plain = dot / torch.where(some, 1.0, norms[0] * norms[1])
    return torch.where(some, (zero[0] & zero[1]).to(dot.dtype), plain)


def cosine_sums(call: AttentionCall, positions: Tensor, candidates: Sequence[Candidate]) -> Tensor:
    """Sum over query positions and the group's query heads of the cosine with the last candidate's output,
    float64 [K, Hkv]; divide by `len(positions) * group` for the mean."""
    total = torch.zeros(len(candidates), call.value.shape[0], dtype=torch.float64)
    for _, found in outputs(call, positions, candidates):
        total += cosine(found, found[-1:]).sum((2, 3), dtype=torch.float64).cpu()
    return total
