"""Whole rules: terms together, regions, scopes, tables, and every example method."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from kvir.kernels.ref.score import score
from kvir.kernels.ref.score_needs import running, skips, term_scores
from kvir.kernels.ref.select_offer import LayerState, candidate_rows
from kvir.kernels.ref.select_preference import layer_preference, share_out
from kvir.kernels.ref.select_rule import select_rule
from kvir.kernels.score_ops import ScoreInputs
from kvir.policy_ir import load, parse
from kvir.policy_ir import scores as ir
from kvir.policy_ir.budgets import Preference
from kvir.policy_ir.rules import Rule
from kvir.policy_ir.terms import TopK
from support.score_cases import Layer, Shape, make

ROOT = Path(__file__).parents[2]
SHAPES = [Shape(203, 2, 3, 6), Shape(61, 3, 1, 10), Shape(127, 1, 8, 16)]
GROUPS = pytest.mark.parametrize("shape", SHAPES, ids=str)


def rule(text: str) -> Rule:
    return parse(f"kvir: 1\nname: x\nrules:\n  - {text}\n", "x").rules[0]


def states(of: Rule, shape: Shape, count: int = 3) -> tuple[list[LayerState], list[Layer]]:
    layers = [make(Shape(**{**vars(shape), "seed": 100 * i})) for i in range(count)]
    specs = [spec for term in of.keep for spec in term_scores(term)]
    heads = tuple(range(shape.kv_heads))
    return [LayerState(inputs(layer, specs, i), heads) for i, layer in enumerate(layers)], layers


def inputs(layer: Layer, specs: list[ir.Score], index: int) -> ScoreInputs:
    every = ir.Sum(parts=tuple(ir.Part(score=spec) for spec in specs)) if specs else ir.KeyNorm()
    made = layer.inputs(every, (0, layer.shape.n))
    assert set(made.running) == set(running(every))
    assert set(made.moments) == set(skips(every))
    return ScoreInputs(**{**vars(made), "layer": index})


def counts(text: str, shape: Shape, prompt: int | None = None, layers: int = 3) -> dict[tuple[int, int], int]:
    made, _ = states(rule(text), shape, layers)
    kept = select_rule(rule(text), made, shape.n if prompt is None else prompt)
    for rows in kept.values():
        assert (rows.diff() > 0).all()
    return {unit: len(rows) for unit, rows in kept.items()}


@GROUPS
def test_budgets_count_what_they_say(shape: Shape) -> None:
    n = shape.n
    kept = "{keep: [{sink: 2}, {recent: 5}, {top_k: {tokens: 30, by: key_norm, counts: kept}}]}"
    assert set(counts(kept, shape).values()) == {30}
    selected = "{keep: [{sink: 2}, {recent: 5}, {top_k: {tokens: 30, by: key_norm}}]}"
    assert set(counts(selected, shape).values()) == {37}
    share = "{keep: [{recent: 5}, {top_k: {fraction: 0.25, by: {attention: {window: 5}}, counts: kept}}]}"
    assert set(counts(share, shape).values()) == {n // 4}
    whole = "{keep: [{recent: 5}, {top_k: {tokens: 900, by: key_norm, counts: kept}}]}"
    assert set(counts(whole, shape).values()) == {n}
    assert set(counts("{keep: all}", shape).values()) == {n}
    assert set(counts("{keep: [{sink: 4}, {recent: 9}]}", shape).values()) == {13}
    assert set(counts("{keep: [{sink: 400}, {recent: 900}]}", shape).values()) == {n}


@GROUPS
@pytest.mark.parametrize("scope", ["layer", "model"])
def test_rivals_share_their_budgets(scope: str, shape: Shape) -> None:
    by = "{laprox: {window: 5}}" if scope == "model" else "{attention: {window: 5}}"
    term = f"{{tokens: 20, by: {by}, scope: {scope}, counts: kept, floor: 3}}"
    text = f"{{keep: [{{recent: 5}}, {{top_k: {term}}}]}}"
    kept = counts(text, shape)
    heads = shape.kv_heads
    assert min(kept.values()) >= 8
    if scope == "model":
        assert sum(kept.values()) == 3 * heads * 20
    else:
        for layer in range(3):
            assert sum(kept[layer, head] for head in range(heads)) == heads * 20
    total = f"{{keep: {{top_k: {{total: 50, by: {by}, scope: {scope}}}}}}}"
    assert sum(counts(total, shape).values()) == (50 if scope == "model" else 150)


def test_model_scope_takes_the_best_of_all_layers() -> None:
    """Each layer's scores are shares of its own sum; the threshold is one for all."""
    text = rule("{keep: [{recent: 5}, {top_k: {tokens: 40, by: {laprox: {window: 5}}, scope: model}}]}")
    made, _ = states(text, SHAPES[0])
    kept = select_rule(text, made, 203)
    top = text.keep[1]
    assert isinstance(top, TopK)
    scores = {
        (i, head): score(top.by, ScoreInputs(**{**vars(s.inputs), "candidates": (0, 198)}))[head]
        for i, s in enumerate(made)
        for head in (0, 1)
    }
    inside = torch.cat([scores[u][kept[u][kept[u] < 198]] for u in kept])
    assert len(inside) == 6 * 40
    every = torch.cat([s[:198] for s in scores.values()])
    assert inside.min() == every.sort(descending=True).values[6 * 40 - 1]


@GROUPS
def test_tables_and_full(shape: Shape) -> None:
    kept = counts(
        "{keep: [{recent: 5}, {top_k: {per_layer: [10, full, 20], by: key_norm, counts: kept}}]}", shape
    )
    assert [kept[layer, 0] for layer in range(3)] == [10, shape.n, 20]
    heads = shape.kv_heads
    row = [7, 9, 11][:heads]
    table = "[" + ", ".join([f"{row}"] * 3) + "]"
    tied = f"{{keep: {{top_k: {{per_head: {table}, by: key_norm, tie: layer}}}}}}"
    made, _ = states(rule(tied), shape)
    rows = select_rule(rule(tied), made, shape.n)
    for layer in range(3):
        assert [len(rows[layer, head]) for head in range(heads)] == row
        for head in range(1, heads):  # one ranking, cut at different places
            assert set(rows[layer, head - 1].tolist()) < set(rows[layer, head].tolist())


@GROUPS
def test_units_of_a_layer_keep_the_same_rows(shape: Shape) -> None:
    text = "{keep: [{recent: 1}, {top_k: {tokens: 25, by: last_query, counts: kept, tie: layer}}]}"
    made, layers = states(rule(text), shape)
    kept = select_rule(rule(text), made, shape.n)
    n = shape.n
    for index, layer in enumerate(layers):
        mean = np.sum([layer.weights(head, n - 1) for head in range(layer.q.shape[1])], axis=0)
        wanted = sorted([*np.argsort(-mean[: n - 1])[:24].tolist(), n - 1])
        for head in range(shape.kv_heads):
            assert kept[index, head].tolist() == wanted


@pytest.mark.parametrize("region", ["prompt", "generated", "all"])
def test_regions_protect_rows(region: str) -> None:
    text = f"{{keep: [{{sink: 2}}, {{recent: 5}}, {{top_k: {{tokens: 9, by: key_norm}}}}], region: {region}}}"
    made, _ = states(rule(text), SHAPES[0])
    kept = select_rule(rule(text), made, prompt=150)
    for rows in kept.values():
        safe = {"prompt": range(150, 203), "generated": range(150), "all": range(0)}[region]
        assert set(safe) <= set(rows.tolist())
        assert len(rows) == {"prompt": 2 + 9 + 53, "generated": 150 + 9 + 5, "all": 16}[region]


def test_candidates() -> None:
    keep = rule("{keep: [{sink: 2}, {recent: 5}, {top_k: {tokens: 9, by: key_norm}}]}").keep
    assert candidate_rows(keep, "all", 20, 20) == (2, 15)
    assert candidate_rows(keep, "all", 6, 6) == (2, 2)
    assert candidate_rows(keep, "all", 1, 1) == (1, 1)
    assert candidate_rows(keep, "prompt", 20, 10) == (2, 10)
    assert candidate_rows(keep, "generated", 20, 10) == (10, 15)
    assert candidate_rows(keep, "generated", 20, 18) == (18, 18)


@GROUPS
def test_top_p_keeps_the_mass_of_attention(shape: Shape) -> None:
    text = "{keep: [{recent: 5}, {top_p: {mass: 0.9, by: {attention: {window: 5}}}}]}"
    made, layers = states(rule(text), shape)
    kept = select_rule(rule(text), made, shape.n)
    stop = shape.n - 5
    for (index, head), rows in kept.items():
        heads = layers[index].heads_of(head)
        mean = np.sum([layers[index].matrix(h)[-5:, :stop].sum(axis=0) for h in heads], axis=0)
        inside = rows[rows < stop].numpy()
        assert mean[inside].sum() >= 0.9 * mean.sum() * (1 - 1e-6)
        assert mean[inside].sum() - mean[inside].min() < 0.9 * mean.sum()
    union = (
        "{keep: {top_p: {mass: 0.9, by: rkv, of: {attention: {window: 8}}, rows: union, floor: 6, cap: 30}}}"
    )
    assert all(6 <= count <= 30 for count in counts(union, shape).values())


@GROUPS
def test_preference_shares_rows_among_layers(shape: Shape) -> None:
    term = "{preference: {mean: 20, window: 5}, by: {attention: {window: 5}}, counts: kept}"
    text = f"{{keep: [{{recent: 5}}, {{top_k: {term}}}]}}"
    made, layers = states(rule(text), shape)
    kept = select_rule(rule(text), made, shape.n)
    assert sum(len(rows) for rows in kept.values()) == 3 * shape.kv_heads * 20
    spec = Preference(mean=20, window=5)
    found = [layer_preference(spec, state.inputs) for state in made]
    past = shape.n - 5
    for layer, value in zip(layers, found, strict=True):
        entropy = variance = 0.0
        for head in range(layer.q.shape[1]):
            a = layer.matrix(head)[-5:, :past]
            entropy -= (a * np.log(a + 1e-10)).sum()
            variance += a.var(axis=0, ddof=1).sum()
        assert value == pytest.approx(entropy * variance, rel=1e-4)
    order = sorted(range(3), key=lambda i: found[i])
    sizes = [len(kept[i, 0]) for i in order]
    assert sizes == sorted(sizes)


def test_share_out() -> None:
    assert share_out([1, 1, 2], 8, 100) == [6, 6, 12]
    assert share_out([1, 1, 2], 10, 100) == [8, 7, 15]  # 7.5, 7.5, 15
    assert share_out([1, 1, 8], 10, 12) == [9, 9, 12]  # the surplus of the third, equally
    assert share_out([0, 0], 5, 9) == [5, 5]
    assert share_out([1, 5], 50, 9) == [9, 9]


METHODS = sorted((ROOT / "examples" / "methods").glob("*.ir"))


@GROUPS
@pytest.mark.parametrize("path", METHODS, ids=lambda p: p.stem)
def test_every_example_method_can_be_run(path: Path, shape: Shape) -> None:
    """Prompts here are shorter than most budgets; what is asked is that every score and term is computed."""
    for of in load(path).rules:
        specs = [spec for term in of.keep for spec in term_scores(term)]
        layers = 31 if "per_head" in path.read_text() else 2
        if layers > 2 and shape.kv_heads != 3:
            continue
        layer = make(shape)
        wide = ScoreInputs(
            **{**vars(inputs(layer, specs, 0)), "rope": make(Shape(700, *astuple(shape))).rope}
        )
        made = [
            LayerState(ScoreInputs(**{**vars(wide), "layer": i}), tuple(range(shape.kv_heads)))
            for i in range(min(layers, 30))
        ]
        kept = select_rule(of, made, shape.n)
        assert len(kept) == len(made) * shape.kv_heads
        for rows in kept.values():
            assert 0 < len(rows) <= shape.n


def astuple(shape: Shape) -> tuple[int, int, int]:
    return shape.kv_heads, shape.group, shape.head_dim
