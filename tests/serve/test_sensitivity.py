"""The other tests are worth something: with this model a single wrong row in a single head would be seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as replace_struct

from evaluation.oracle import Forced, Masks, Oracle
from kvir.lowering.stages import ExecutionPlan, Retention

PROMPT_TOKENS, OUTPUT_TOKENS = 800, 40


@pytest.fixture(scope="module")
def probe(tiny_model: Path, plan_of: Callable[[str], ExecutionPlan], ids: list[int]) -> Callable[..., Forced]:
    """Log-probabilities of one text under the uniform policy, with one unit's retention replaced."""
    masks = Masks.of(plan_of("uniform").budgeted)
    oracle = Oracle(tiny_model, masks)

    def force(layer: int = 0, head: int = 0, **changes: int) -> Forced:
        prefill = {number: list(heads) for number, heads in masks.prefill.items()}
        old: Retention = prefill[layer][head]
        prefill[layer][head] = replace_struct(old, **changes)
        oracle.masks = replace(masks, prefill=prefill, decode=prefill)
        return oracle.force(ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS : PROMPT_TOKENS + OUTPUT_TOKENS])

    return force


def difference(a: Forced, b: Forced) -> float:
    return float((a.logprobs - b.logprobs).abs().max())


@pytest.mark.parametrize("layer", range(4))
@pytest.mark.parametrize("head", range(2))
def test_one_row_more_in_one_head(probe: Callable[..., Forced], layer: int, head: int) -> None:
    assert difference(probe(), probe(layer, head, recent_tokens=257)) > 1e-2


def test_one_sink_less_in_one_head(probe: Callable[..., Forced]) -> None:
    assert difference(probe(), probe(3, 1, sink_tokens=3)) > 1e-2


def test_answers_are_decided(probe: Callable[..., Forced]) -> None:
    """The best token is far from one among 320 equals, and nowhere within rounding of the second."""
    logprobs = probe().logprobs
    first, second = logprobs.topk(2).values.unbind(-1)
    assert float(first.exp().mean()) > 0.1
    assert float((first - second).min()) > 1e-4
