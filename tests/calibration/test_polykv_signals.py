"""The signals of PolyKV against an account by hand, layer after layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvir.calibration.harness import Harness, keep_everything
from kvir.calibration.interface import AttentionCall
from kvir.calibration.memo import Memo
from kvir.calibration.polykv.allocate import Curve, error_at, hull
from kvir.calibration.polykv.budgets import share_out
from kvir.calibration.polykv.kept import Model, kept_rows
from kvir.calibration.polykv.methods import find
from kvir.calibration.polykv.run import understand
from kvir.calibration.polykv.signals import Grain, LayerSignals, Setting, choose, signals
from kvir.calibration.samples import Sample, token_ids
from support.tiny import TEXT

Folder = Callable[[str], Path]
PROMPT, AFTER = 120, 16
NAMES = ("snapkv", "keydiff", "h2o")


@pytest.fixture(scope="module")
def harness(model_folder: Folder) -> Harness:
    return Harness(model_folder("llama"))


@pytest.fixture(scope="module")
def model(harness: Harness) -> Model:
    return understand(harness, PROMPT + 600)


def setting_of(grain: Grain) -> Setting:
    methods = find(NAMES, sink_tokens=2, recent_tokens=4, per_head=grain == "head")
    return Setting(methods, (0.1, 0.3, 0.6, 1.0), 1, PROMPT, grain, 2.0)


@pytest.fixture(scope="module")
def samples(harness: Harness) -> list[Sample]:
    ids = token_ids(harness, TEXT)
    positions = tuple(range(PROMPT, PROMPT + AFTER, 3))
    size = PROMPT + AFTER
    made = [Sample(tuple(ids[i * size : (i + 1) * size]), positions, prompt_tokens=PROMPT) for i in range(3)]
    return [made[0], made[1], replace(made[2], kind="retrieval")]


def attended(call: AttentionCall, kept: Tensor) -> Tensor:
    """[T, Hq, D]: queries after the prompt see `kept` [Hkv, P] of it; in float64, query by query."""
    heads, tokens, size = call.query.shape
    out = torch.empty(tokens, heads, size, dtype=torch.float64)
    query, key, value = (x.double() for x in (call.query, call.key, call.value))
    for h in range(heads):
        head = h // call.group
        for t in range(tokens):
            seen = torch.ones(t + 1, dtype=torch.bool)
            if t >= PROMPT:
                seen[:PROMPT] = kept[head]
            weights = (key[head, : t + 1][seen] @ query[h, t] * call.scale).softmax(0)
            out[t, h] = weights @ value[head, : t + 1][seen]
    return out


@pytest.mark.parametrize("grain", ["layer", "head"])
def test_signals_are_those_of_a_pass_by_hand(
    grain: Grain, harness: Harness, model: Model, samples: list[Sample]
) -> None:
    setting = setting_of(grain)
    found, chosen = signals(harness, model, setting, samples, Memo(None, {}), lambda: None)
    assert [len(row) for row in chosen] == [1 if grain == "layer" else 2] * 3
    everything = torch.ones(2, PROMPT, dtype=torch.bool)
    layer_index = 2
    wanted = torch.zeros(2, 3, 4, len(chosen[0]), dtype=torch.float64)
    for sample in samples:
        weight = 2.0 if sample.kind == "retrieval" else 0.5  # the mean of two texts
        streams: dict[int, Tensor] = {}
        now: list[AttentionCall] = []

        def attention(call: AttentionCall, now: list[AttentionCall] = now) -> Tensor:
            if call.layer_id == layer_index:
                now.append(call)
            if call.layer_id >= layer_index:
                return keep_everything(call)
            kept = torch.zeros_like(everything)
            for u, m in enumerate(chosen[call.layer_id]):
                (rows,) = rows_of(model, setting, call, m, [1])
                heads = slice(None) if grain == "layer" else slice(u, u + 1)
                kept[heads] = rows[heads]
            return attended(call, kept).float()

        def enters(module: Any, args: Any, streams: dict[int, Tensor] = streams) -> None:
            streams[0] = args[0][0]

        hook = model.parts[layer_index].decoder_layer.register_forward_pre_hook(enters)
        harness.hidden(sample.ids, attention)
        hook.remove()
        (call,) = now
        at = list(sample.positions)
        weights = model.parts[layer_index].output.weight.double()
        full = attended(call, everything)[at]
        norms = streams[0][at].double().norm(dim=-1)
        for m in range(3):
            for k, rows in enumerate(rows_of(model, setting, call, m, [0, 1, 2])):
                change = attended(call, rows)[at] - full
                for u in range(len(chosen[0])):
                    part = torch.zeros_like(change)
                    heads = slice(None) if grain == "layer" else slice(u * 2, u * 2 + 2)
                    part[:, heads] = 1
                    moved = ((change * part).flatten(1) @ weights.T).norm(dim=-1)
                    whole = ((full * part).flatten(1) @ weights.T).norm(dim=-1)
                    wanted[0, m, k, u] += weight * (moved / whole).mean()
                    wanted[1, m, k, u] += weight * (moved / norms).mean()
    signal = found[layer_index]
    have = torch.tensor([signal.relative, signal.residual], dtype=torch.float64)
    torch.testing.assert_close(have, wanted, atol=1e-4, rtol=1e-3)
    assert bool((have[:, :, -1] == 0).all()), "a full history changes nothing"


def rows_of(
    model: Model, setting: Setting, call: AttentionCall, method: int, budgets: list[int]
) -> list[Tensor]:
    one = setting.methods[method]
    assert one.term is not None
    inputs = model.inputs(call, PROMPT, [one.term.by])
    return kept_rows(one, inputs, [round(setting.shares[k] * PROMPT) for k in budgets])


def test_interrupted_and_resumed_is_the_same(
    harness: Harness, model: Model, samples: list[Sample], tmp_path: Path
) -> None:
    class Enough(Exception):
        pass

    setting, path = setting_of("head"), tmp_path / "memo"
    whole = signals(harness, model, setting, samples, Memo(None, {}), lambda: None)
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == 5:  # in the second layer
            raise Enough

    with pytest.raises(Enough):
        signals(harness, model, setting, samples, Memo(path, {}), step)
    assert len(Memo(path, {})) == 1
    again = Memo(path, {})
    assert signals(harness, model, setting, samples, again, lambda: None) == whole
    assert len(again) == 3
    assert signals(harness, model, setting, samples, again, lambda: None) == whole


def test_the_least_error_is_chosen_and_the_first_of_equals() -> None:
    signal = LayerSignals([[[2.0, 1.0]], [[1.0, 1.0]], [[3.0, 0.5]]], [])
    assert choose(signal, 0) == [1, 2]
    assert choose(LayerSignals([[[1.0]], [[1.0]]], []), 0) == [0]


def test_rows_go_where_they_help_most(harness: Harness, model: Model, samples: list[Sample]) -> None:
    setting = setting_of("head")
    measured, routed = signals(harness, model, setting, samples, Memo(None, {}), lambda: None)
    found = share_out(harness, setting, measured, routed, 0.3)
    assert [[choice.method for choice in row] for row in found] == routed
    rows = [choice.rows for row in found for choice in row]
    assert 0.3 * PROMPT * 6 - 1 <= sum(rows) <= 0.3 * PROMPT * 6
    assert min(rows) >= round(0.1 * PROMPT)
    budgets = tuple(round(share * PROMPT) for share in setting.shares)
    hulls = [
        hull(Curve(budgets, tuple(at_budget[u] for at_budget in measured[i].residual[m])))
        for i, row in enumerate(routed)
        for u, m in enumerate(row)
    ]
    total = sum(error_at(one, n) for one, n in zip(hulls, rows, strict=True))
    for give, take in itertools.permutations(range(6), 2):
        moved = list(rows)
        moved[give], moved[take] = moved[give] - 1, moved[take] + 1
        if moved[give] >= budgets[0] and moved[take] <= PROMPT:
            other = sum(error_at(one, n) for one, n in zip(hulls, moved, strict=True))
            assert total <= other + 1e-12, "an exchange of rows lowers the sum"
