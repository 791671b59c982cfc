"""The oracle against plain transformers, and the comparison against every kind of damage."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from evaluation.oracle import LOGPROB_TOLERANCE, Agreement, Forced, Masks, Oracle, check, compare, visible
from evaluation.server import Served
from kvir.lowering.stages import Retention
from support import tiny_llama
from support.tiny_llama import token_stream

FULL = Retention(sink_tokens=0, recent_tokens=None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make(tmp_path_factory.mktemp("tiny") / "model")


def served(prompt: list[int], forced: Forced, outputs: tuple[int, ...]) -> Served:
    """A request served exactly as the oracle says."""
    return Served(
        prompt_ids=tuple(prompt),
        output_ids=outputs,
        text="",
        logprobs=forced.of(outputs),
        top=forced.top(5),
        cached_tokens=0,
        retractions=0,
        meta={},
    )


def greedy(oracle: Oracle, prompt: list[int], count: int) -> tuple[int, ...]:
    outputs: tuple[int, ...] = ()
    for _ in range(count):
        outputs += oracle.force(prompt, (*outputs, 0)).argmax()[-1:]
    return outputs


@pytest.mark.parametrize(
    ("retention", "query", "seen"),
    [
        pytest.param(None, 3, {0, 1, 2, 3}, id="nothing-said-keeps-all"),
        pytest.param(FULL, 3, {0, 1, 2, 3}, id="all"),
        pytest.param(Retention(sink_tokens=0, recent_tokens=1), 3, {3}, id="recent-1-is-the-query-alone"),
        pytest.param(Retention(sink_tokens=0, recent_tokens=3), 5, {3, 4, 5}, id="recent-3"),
        pytest.param(Retention(sink_tokens=2, recent_tokens=2), 5, {0, 1, 4, 5}, id="sinks-and-recent"),
        pytest.param(Retention(sink_tokens=4, recent_tokens=2), 1, {0, 1}, id="sinks-are-causal"),
        pytest.param(Retention(sink_tokens=2, recent_tokens=9), 5, {0, 1, 2, 3, 4, 5}, id="wide-window"),
    ],
)
def test_visible_rows(retention: Retention | None, query: int, seen: set[int]) -> None:
    mask = visible(retention, torch.tensor([query]), torch.arange(8))
    assert set(mask[0].nonzero().flatten().tolist()) == seen


@pytest.mark.parametrize("length", [1, 17, 300], ids=lambda n: f"prompt-{n}")
def test_identity_is_plain_transformers(model: Path, length: int) -> None:
    prompt, outputs = token_stream(length, 1), token_stream(5, 2)
    plain = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits = plain(torch.tensor([prompt + outputs])).logits[0, length - 1 : -1]
    forced = Oracle(model, Masks.full()).force(prompt, outputs)
    assert (forced.logprobs - logits.log_softmax(-1)).abs().max() < 2e-5


def test_only_the_named_head_is_masked(model: Path) -> None:
    """Forgetting far rows in one head changes the answer; a window wider than the text changes nothing."""
    prompt, outputs = token_stream(300, 3), token_stream(4, 4)
    full = Oracle(model, Masks.full()).force(prompt, outputs).logprobs

    def with_window(recent_tokens: int) -> torch.Tensor:
        layer = (FULL, Retention(sink_tokens=0, recent_tokens=recent_tokens))
        return Oracle(model, Masks({1: layer}, {1: layer})).force(prompt, outputs).logprobs

    assert (with_window(304) - full).abs().max() == 0
    assert (with_window(150) - full).abs().max() > LOGPROB_TOLERANCE


def test_phases_change_at_the_end_of_the_prompt(model: Path) -> None:
    prompt, outputs = token_stream(40, 5), token_stream(6, 6)
    narrow = (Retention(sink_tokens=1, recent_tokens=8),) * 2
    decode_only = Oracle(model, Masks(prefill={}, decode=dict.fromkeys(range(4), narrow)))
    full = Oracle(model, Masks.full()).force(prompt, outputs).logprobs
    narrowed = decode_only.force(prompt, outputs).logprobs
    assert (narrowed[0] - full[0]).abs().max() < 1e-6, "the first output token comes from a prefill query"
    assert (narrowed[1:] - full[1:]).abs().amax(-1).min() > LOGPROB_TOLERANCE
    as_prompt = decode_only.force(prompt, outputs, prefill_tokens=len(prompt) + len(outputs)).logprobs
    assert (as_prompt - full).abs().max() < 1e-6


def test_agreement_of_a_healthy_server(model: Path) -> None:
    oracle = Oracle(model, Masks.full())
    prompts = [token_stream(30, 7), token_stream(20, 8), token_stream(30, 7)]
    answers = []
    for prompt in prompts:
        outputs = greedy(oracle, prompt, 4)
        answers.append(served(prompt, oracle.force(prompt, outputs), outputs))
    agreement = check(oracle, answers)
    assert agreement.ok, agreement
    assert agreement.tokens == 12


def test_damage_is_seen(model: Path) -> None:
    oracle = Oracle(model, Masks.full())
    prompt = token_stream(30, 9)
    outputs = greedy(oracle, prompt, 4)
    truth = oracle.force(prompt, outputs)
    good = served(prompt, truth, outputs)

    def agreement(bad: Served) -> Agreement:
        return compare([good, bad], [truth, truth])

    nan = agreement(replace(good, logprobs=(*good.logprobs[:-1], math.nan)))
    assert nan.nan
    assert not nan.ok
    shifted = agreement(replace(good, logprobs=(good.logprobs[0] + 2e-4, *good.logprobs[1:])))
    assert not shifted.ok, "equal tokens with a foreign log-probability"
    assert shifted.equal == shifted.tokens
    candidates = ((good.top[0][0], (good.top[0][1][0], good.top[0][1][1] - 1e-3)), *good.top[1:])
    assert not agreement(replace(good, top=candidates)).ok
    worst = int(truth.logprobs[2].argmin())
    other = (*outputs[:2], worst, outputs[3])
    wrong = compare([good, served(prompt, truth, other)], [truth, truth])
    assert not wrong.ok
    assert wrong.first_mismatch == (1, 2)
    with pytest.raises(ValueError, match="other output tokens"):
        agreement(replace(good, output_ids=outputs[:3]))
    with pytest.raises(ValueError, match="nothing to compare"):
        compare([], [])
