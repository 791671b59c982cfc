"""A difference is a tie only if some other rounding of the scores gives what was served."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from evaluation.oracle import Forced
from evaluation.rounding import Rounding, Ties, ties
from evaluation.selection_oracle import SelectionOracle
from evaluation.server import Served
from kvir.lowering.load import plan_for_server
from support import tiny_llama

RULE = "{keep: [{recent: 8}, {top_k: {tokens: 40, by: key_norm}}], trigger: prefill_end}"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> SelectionOracle:
    folder = tmp_path_factory.mktemp("rounding")
    model = tiny_llama.make(folder / "model", layers=2)
    policy = folder / "policy.ir"
    policy.write_text(f"kvir: 1\nname: any\nrules: [{RULE}]\n")
    return SelectionOracle(model, plan_for_server(policy, model, dtype="float32"))


def served(forced: Forced, prompt: tuple[int, ...], output: tuple[int, ...]) -> Served:
    return Served(prompt, output, "", forced.of(output), (), 0, 0, {})


def request(oracle: SelectionOracle, rounding: Rounding | None = None) -> Served:
    """What a server would answer whose scores are rounded in this way."""
    prompt, output = tuple(tiny_llama.token_stream(200)), list[int]()
    for _ in range(4):
        oracle.rounding = rounding and Rounding(rounding.seed)
        forced = oracle.force(prompt, [*output, 0])
        output.append(forced.argmax()[-1])
    oracle.rounding = rounding and Rounding(rounding.seed)
    found = served(oracle.force(prompt, output), prompt, tuple(output))
    oracle.rounding = None
    return found


def test_what_the_oracle_says_itself_needs_no_explanation(oracle: SelectionOracle) -> None:
    assert ties(oracle, [request(oracle)]) == Ties(requests=1, off=0, explained=0)


def test_another_row_is_not_explained(oracle: SelectionOracle) -> None:
    one = request(oracle)
    wrong = replace(one, logprobs=tuple(x + 0.01 for x in one.logprobs))
    assert ties(oracle, [one, wrong]) == Ties(requests=2, off=1, explained=0)


def test_a_tie_is_explained(oracle: SelectionOracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors so large that many rows are ties: whatever one of them decides is right."""
    monkeypatch.setattr("evaluation.rounding.RELATIVE", 0.3)
    one, other = request(oracle), request(oracle, Rounding(3))
    differences = [abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)]
    assert max(differences) > 1e-3
    assert ties(oracle, [one, other]) == Ties(requests=2, off=1, explained=1)


def test_errors_are_small_and_the_same_for_the_same_seed() -> None:
    x = torch.linspace(1, 2, 50)
    a, b, c = (Rounding(seed).off(x) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert 0 < ((a - x) / x).abs().max() < 1e-5
