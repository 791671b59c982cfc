"""Gates between full histories and windows: their fit, and the heads that it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import kl_div

from kvir.calibration import gates
from kvir.calibration.attend import attend, attend_phases
from kvir.calibration.candidates import FULL, Candidate
from kvir.calibration.gates import Fit, fit_gates, gates_of, mixed, schedule, share_out
from kvir.calibration.harness import Harness
from kvir.calibration.interface import AttentionCall
from kvir.calibration.memo import Memo
from kvir.calibration.residual import allocate
from kvir.calibration.samples import Sample
from support.tiny import TEXT

Folder = Callable[[str], Path]

CUT = Candidate(8, 2)
FIT = Fit(CUT, mean=0.5, steps=12, retrieval_weight=1.0)


def sample(harness: Harness, tokens: int = 64, *, prompt_tokens: int = 0) -> Sample:
    ids = harness.tokenizer(TEXT).input_ids[:tokens]
    return Sample(tuple(ids), tuple(range(tokens // 2, tokens, 4)), prompt_tokens=prompt_tokens)


def none() -> None:
    pass


def test_the_mean_of_the_gates_is_what_the_budget_allows() -> None:
    rng = np.random.default_rng(0)
    sizes = rng.uniform(1, 3, 40)
    sizes /= sizes.sum()
    for mean in (0.05, 0.37, 0.8):
        for temperature in (1.0, 0.25):
            logits = rng.normal(0, 3, 40)
            found = gates_of(logits, sizes, mean, temperature)
            assert sizes @ found == pytest.approx(mean, abs=1e-9)
            assert (np.diff(found[logits.argsort()]) >= 0).all()
    means = [schedule(FIT, step)[0] for step in range(FIT.steps)]
    assert means[0] == 0.8
    assert means[-1] == 0.5
    assert means == sorted(means, reverse=True)


@pytest.mark.parametrize("prompt_tokens", [0, 40])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_gradient_is_that_of_the_divergence(
    model_folder: Folder, family: str, prompt_tokens: int
) -> None:
    harness = Harness(model_folder(family))
    one = sample(harness, prompt_tokens=prompt_tokens)
    count = sum(layer.kv_heads for layer in harness.configurable)
    values = np.random.default_rng(1).uniform(0.2, 0.8, count)
    full = gates.full_predictions(harness, one)
    gradient = gates._gradient(harness, one, CUT, values, full)

    def divergence(values: np.ndarray) -> float:
        rows = iter(values.tolist())
        given = {
            layer.layer_id: torch.tensor([next(rows) for _ in range(layer.kv_heads)])
            for layer in harness.configurable
        }

        def attention(call: AttentionCall) -> torch.Tensor:
            return mixed(call, given[call.layer_id], CUT, one.prompt_tokens)

        predicted = gates._predicted(harness, harness.hidden(one.ids, attention), one)
        return float(kl_div(predicted, full, log_target=True, reduction="sum")) / len(one.positions)

    assert divergence(np.ones(count)) == pytest.approx(0, abs=1e-6)
    step = 0.002
    for head in range(count):
        moved = [values.copy(), values.copy()]
        moved[0][head] += step
        moved[1][head] -= step
        slope = (divergence(moved[0]) - divergence(moved[1])) / (2 * step)
        assert gradient[head] == pytest.approx(slope, rel=0.05, abs=2e-2 * np.abs(gradient).max())


def test_a_closed_gate_is_the_window_and_an_open_one_all(model_folder: Folder) -> None:
    harness = Harness(model_folder("llama"))
    seen = list[AttentionCall]()

    def attention(call: AttentionCall) -> torch.Tensor:
        seen.append(call)
        return mixed(call, torch.ones(call.key.shape[0]), CUT, 0)

    harness.hidden(sample(harness).ids, attention)
    for call in seen:
        heads = call.key.shape[0]
        closed = torch.zeros(heads)
        torch.testing.assert_close(mixed(call, closed, CUT, 0), attend(call, [CUT] * heads))
        torch.testing.assert_close(mixed(call, closed + 1, CUT, 0), attend(call, [FULL] * heads))
        late = attend_phases(call, [FULL] * heads, [CUT] * heads, 40)
        torch.testing.assert_close(mixed(call, closed, CUT, 40), late)


def test_heads_that_say_nothing_lose_their_history(model_folder: Folder) -> None:
    """Heads whose values are zero cannot matter; the fit must close their gates and open the others."""
    harness = Harness(model_folder("llama"))
    silent: set[tuple[int, int]] = set()
    for layer in harness.configurable:
        head = layer.layer_id % layer.kv_heads
        values = harness.model.base_model.layers[layer.layer_id].self_attn.v_proj.weight
        values.data[head * layer.head_dim : (head + 1) * layer.head_dim] = 0
        silent.add((layer.layer_id, head))
    found = fit_gates(harness, [sample(harness)], FIT, Memo(None, None), none)
    heads = [(i, h) for i, row in enumerate(found) for h in range(len(row))]
    heads.sort(key=lambda head: found[head[0]][head[1]])
    assert set(heads[: len(silent)]) == silent


def test_a_fit_goes_on_where_it_stopped(model_folder: Folder, tmp_path: Path) -> None:
    harness = Harness(model_folder("llama"))
    samples = [sample(harness), replace(sample(harness, 48), kind="retrieval")]
    whole = fit_gates(harness, samples, FIT, Memo(None, None), none)
    done = 0

    def stop() -> None:
        nonlocal done
        done += 1
        if done == 5:
            raise KeyboardInterrupt

    path = tmp_path / "unfinished"
    with pytest.raises(KeyboardInterrupt):
        fit_gates(harness, samples, FIT, Memo(path, "same"), stop)
    memo = Memo(path, "same")
    assert len(memo) == 5
    assert fit_gates(harness, samples, FIT, memo, none) == whole


def test_full_histories_go_to_the_greatest_logits() -> None:
    logits = [[3.0, -1.0], [0.5, 2.0]]
    errors = (((5.0, 1.0), (2.0, 0.5), (0.0, 0.0)), ((4.0, 9.0), (1.0, 3.0), (0.0, 0.0)))
    costs = [[4, 8, 20], [4, 8, 20]]
    # 8 each, 12 more for a full one: two fit into 60, and 4 are left
    assert share_out(logits, errors, costs, 1, 60) == ((2, 1), (1, 2))
    # with 52 one of the other two has to take the smallest, the one that loses less by it
    assert share_out(logits, errors, costs, 0, 50) == ((2, 0), (0, 2))
    assert share_out(logits, errors, costs, 0, 52) == ((2, 0), (1, 2))
    assert share_out(logits, errors, costs, 1, 15) is None
    assert allocate(errors, costs, 52) is not None
