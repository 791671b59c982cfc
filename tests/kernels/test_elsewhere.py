"""Scores, selections, merges and copies of a second device (`support.elsewhere`): the same rows as here, and
no tensor of one device meets one of the other."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvir.kernels.ref.compact import compact, copy_biases
from kvir.kernels.ref.merge import merge_rows
from kvir.kernels.ref.prompt_inputs import prompt_inputs
from kvir.kernels.ref.score_needs import term_scores
from kvir.kernels.ref.select_offer import LayerState
from kvir.kernels.ref.select_rule import select_rule
from kvir.policy_ir import load, parse
from kvir.policy_ir.rules import Merge, Rule
from support.elsewhere import DEVICE, back, elsewhere, move
from support.score_cases import Layer, Shape, make

ROOT = Path(__file__).parents[2]
METHODS = sorted((ROOT / "examples" / "methods").glob("*.ir"))
WINDOW = "{attention: {window: 5}}"
# the score or budget that is new in each, and the rows beside it
TERMS = {
    "attention-logits": "[{recent: 5}, {top_k: {tokens: 30, by: {attention: {window: 5, pool: {max: 5}, "
    "group_at: logits, group: max, softmax: candidates}}}}]",
    "squares": "{top_k: {tokens: 30, by: {accumulated: {rows: squares, decay: 0.9}}}}",
    "seen": "{top_k: {tokens: 30, by: {persistent: {normalise: seen, threshold: 1.5}}}}",
    "noncausal": "{top_k: {tokens: 30, by: {noncausal: {chunk: 32}}}}",
    "expected": "[{sink: 4}, {top_k: {tokens: 30, by: expected_attention}}]",
    "value-leverage": "[{sink: 4}, {top_k: {tokens: 30, by: value_leverage}}]",
    "leverage": "{top_k: {tokens: 30, by: leverage}}",
    "cur": "{top_k: {tokens: 30, by: cur}}",
    "lagkv": "{top_k: {tokens: 30, by: lagkv}}",
    "random": "{top_k: {tokens: 30, by: random}}",
    "rkv": f"{{top_k: {{tokens: 30, by: {{rkv: {{importance: {WINDOW}}}}}}}}}",
    "criticalkv": f"[{{recent: 5}}, {{top_k: {{tokens: 30, by: {{criticalkv: {{base: {WINDOW}}}}}}}}}]",
    "laprox-model": "[{recent: 5}, {top_k: {tokens: 30, by: {laprox: {window: 5}}, scope: model}}]",
    "blocks": "{top_k: {tokens: 32, by: key_norm, block: 8, on_equal: newer}}",
    "tied": "{top_k: {tokens: 25, by: last_query, tie: layer}}",
    "blend": "{top_k: {tokens: 25, by: key_diff, scope: layer, safeguard: {blend: 0.3}}}",
    "preference": f"[{{recent: 5}}, {{top_k: {{preference: {{mean: 20, window: 5}}, by: {WINDOW}}}}}]",
    "nucleus": f"[{{recent: 5}}, {{top_p: {{mass: 0.7, by: key_norm, of: {WINDOW}, floor: 6, cap: 40}}}}]",
    "union": "{top_p: {mass: 0.7, by: rkv, of: {attention: {window: 8}}, rows: union, floor: 6, cap: 30}}",
}


def there(x: Any) -> Any:
    """Every tensor in a value, moved."""
    if isinstance(x, Tensor):
        return move(x)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: there(getattr(x, f.name)) for f in fields(x)})
    if isinstance(x, dict):
        return {key: there(value) for key, value in x.items()}
    return x


def states(rule: Rule, layers: list[Layer], moved: bool) -> list[LayerState]:
    """Statistics are added up chunk by chunk where the keys are."""
    specs = [spec for term in rule.keep for spec in term_scores(term)]
    made: list[LayerState] = []
    for i, layer in enumerate(layers):
        x = there(layer) if moved else layer
        inputs = prompt_inputs(
            specs, x.q, x.k, x.v, scale=layer.scale, logit_cap=layer.shape.logit_cap, layer=i, w_o=x.w_o,
            rope=x.rope, chunk=23,
        )  # fmt: skip
        made.append(LayerState(inputs, tuple(range(layer.shape.kv_heads))))
    return made


def same_rows(rule: Rule, shape: Shape) -> None:
    layers = [make(replace(shape, seed=100 * i)) for i in range(2)]
    here = select_rule(rule, states(rule, layers, moved=False), shape.n)
    with elsewhere():
        found = select_rule(rule, states(rule, layers, moved=True), shape.n)
        assert all(rows.device == DEVICE for rows in found.values())
    assert {unit: back(rows).tolist() for unit, rows in found.items()} == {
        unit: rows.tolist() for unit, rows in here.items()
    }
    assert here


@pytest.mark.parametrize("keep", TERMS.values(), ids=TERMS)
def test_terms(keep: str) -> None:
    rule = parse(f"kvir: 1\nname: x\nrules:\n  - {{keep: {keep}}}\n", "x").rules[0]
    same_rows(rule, Shape(203, 2, 3, 6))
    same_rows(rule, Shape(61, 3, 1, 10))


@pytest.mark.parametrize("path", METHODS, ids=lambda p: p.stem)
def test_every_example_method(path: Path) -> None:
    for rule in load(path).rules:
        if "per_head" not in path.read_text():  # a table of one model's layers
            same_rows(rule, Shape(401, 2, 3, 6))


@pytest.mark.parametrize("into", ["pairwise", "one", "neighbour"])
def test_merges_and_copies(into: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(40, 16, generator=generator) for _ in range(2))
    q = torch.randn(4, 3, 16, generator=generator)
    kept = torch.arange(0, 40, 3)
    spec = Merge(into=into)

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        k, v, bias, positions, stay, q, at, kv, pages, biases = x
        merged = merge_rows(spec, k, v, bias, positions, stay, stay[1:9], q, at, 0.25, 0.0)
        rows = positions[: merged[0].shape[0]]
        assert compact(merged[0], merged[1], rows, kv, pages) == len(kept)
        copy_biases(merged[2], rows, biases, pages)
        return *merged, kv, biases

    given = (
        k, v, torch.zeros(40), torch.arange(40), kept, q, torch.arange(36, 40), torch.zeros(6, 2, 8, 16),
        torch.tensor([4, 2, 1]), torch.zeros(6, 8),
    )  # fmt: skip
    with elsewhere():
        found = run(*map(move, given))
        assert all(x.device == DEVICE for x in found)
    for got, wanted in zip(found, run(*given), strict=True):
        assert torch.equal(back(got), wanted)
