"""Partial sums and blockwise attention against one masked softmax, written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvir.calibration import partial
from kvir.calibration.attend import attend, attend_phases
from kvir.calibration.candidates import FULL, Candidate, codebook
from kvir.calibration.interface import AttentionCall

TOKENS = 700  # more than two query blocks of the deployed attention

CODES = (Candidate(5, 3), Candidate(16), Candidate(16, 4), Candidate(64, 4), Candidate(300, 64), FULL)


def make(*, softcap: float | None = None, learned: bool = False, spread: float = 1.0) -> AttentionCall:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(6, TOKENS, 8, generator=generator) * spread
    key, value = (torch.randn(2, TOKENS, 8, generator=generator) for _ in range(2))
    key[:, :2] *= 4  # something like sinks
    sinks = torch.randn(6, generator=generator) if learned else None
    return AttentionCall(0, query, key, value, 0.5, softcap, sinks)


def masked(call: AttentionCall, head: int, kept: Candidate, positions: Tensor) -> Tensor:
    """One query head, float64: [Q, Dv]."""
    query, key, value = (
        call.query[head].double(),
        call.key[head // call.group].double(),
        call.value[head // call.group].double(),
    )
    logits = query[positions] @ key.T * call.scale
    if call.softcap:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    i, j = positions[:, None], torch.arange(key.shape[0])[None]
    seen = j <= i
    if kept.recent_tokens is not None:
        seen &= (i - j < kept.recent_tokens) | (j < kept.sink_tokens)
    weights = torch.where(seen, logits, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if call.learned_sinks is not None:
        total = total + call.learned_sinks[head].double().exp()
    return weights @ value / total


CALLS = {
    "plain": make(),
    "softcap": make(softcap=3.0),
    "learned sinks": make(learned=True),
    "sharp": make(spread=6.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_partial_sums_equal_a_masked_softmax(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "KEY_BLOCK", 96)
    call = CALLS[name]
    positions = torch.tensor([*range(0, 80, 3), *range(80, TOKENS, 7)])
    found = torch.cat([block for _, block in partial.outputs(call, positions, CODES)], 3)
    for k, kept in enumerate(CODES):
        for head in range(6):
            wanted = masked(call, head, kept, positions)
            torch.testing.assert_close(found[k, head // 3, head % 3].double(), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CALLS)
def test_deployed_attention_equals_a_masked_softmax(name: str) -> None:
    call, positions = CALLS[name], torch.arange(TOKENS)
    for kept in ([CODES[0], FULL], [CODES[4], CODES[4]], [CODES[1], CODES[3]]):
        found = attend(call, kept)
        for head in range(6):
            wanted = masked(call, head, kept[head // 3], positions)
            torch.testing.assert_close(found[:, head].double(), wanted, atol=2e-5, rtol=1e-4)


def test_later_queries_over_an_earlier_cache() -> None:
    whole = CALLS["plain"]
    for count in (1, 9):
        late = AttentionCall(0, whole.query[:, -count:], whole.key, whole.value, whole.scale)
        for kept in ([CODES[3], FULL], [CODES[1], CODES[4]]):
            torch.testing.assert_close(attend(late, kept), attend(whole, kept)[-count:], atol=1e-5, rtol=1e-5)


def test_a_far_smaller_window_loses_no_precision() -> None:
    """The sinks' logits are 200 above the window's: sums relative to one largest logit would underflow."""
    call = CALLS["plain"]
    key = torch.cat([torch.ones(2, 2, 8) * 100, call.key[:, 2:] * 0.1], 1)
    sharp = AttentionCall(0, call.query.abs() + 1, key, call.value, 0.5)
    positions = torch.tensor([500, 699])
    found = torch.cat([block for _, block in partial.outputs(sharp, positions, (Candidate(16), FULL))], 3)
    for head in range(6):
        wanted = masked(sharp, head, Candidate(16), positions)
        torch.testing.assert_close(found[0, head // 3, head % 3].double(), wanted, atol=1e-5, rtol=1e-4)


def test_cosine_rules() -> None:
    x, zero, tiny = torch.tensor([3.0, 4.0]), torch.zeros(2), torch.tensor([1e-13, 0.0])
    pairs = [(x, x), (x, -x), (zero, zero), (tiny, zero), (x, zero), (zero, x), (x, tiny)]
    found = [float(partial.cosine(a, b)) for a, b in pairs]
    assert found == pytest.approx([1, -1, 1, 1, 0, 0, 0])


def test_codebook_is_by_cost_and_full_is_last() -> None:
    codes = codebook((64, 128, 1024), (0, 4), 1024)
    assert [str(code) for code in codes] == ["64", "4+64", "128", "4+128", "full"]
    assert codebook((64,), (), 64) == (FULL,)
    with pytest.raises(ValueError, match="at least 1"):
        codebook((0,), (4,), 64)


def test_phases_split_the_queries_at_the_end_of_the_prompt() -> None:
    whole, prefill, decode = CALLS["plain"], [FULL, CODES[4]], [CODES[1], CODES[3]]
    early, late = attend(whole, prefill), attend(whole, decode)
    for split in (0, 1, 300, TOKENS):
        found = attend_phases(whole, prefill, decode, split)
        torch.testing.assert_close(found, torch.cat([early[:split], late[split:]]), atol=1e-5, rtol=1e-5)
    # queries that come later, over a cache
    rest = AttentionCall(0, whole.query[:, 600:], whole.key, whole.value, whole.scale)
    found = attend_phases(rest, prefill, decode, 650)
    torch.testing.assert_close(found, torch.cat([early[600:650], late[650:]]), atol=1e-5, rtol=1e-5)
