"""Rules of every score and budget over random layers: the rows that stay, on any device.

Statistics are added up chunk by chunk where the keys are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from kvir.kernels.ref.prompt_inputs import prompt_inputs
from kvir.kernels.ref.score_needs import term_scores
from kvir.kernels.ref.select_offer import LayerState, Unit
from kvir.kernels.ref.select_rule import select_rule
from kvir.policy_ir import parse
from kvir.policy_ir.rules import Rule
from support.score_cases import Layer, Shape, make

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


Move = Callable[[Tensor], Tensor]


def rule_of(keep: str) -> Rule:
    return parse(f"kvir: 1\nname: x\nrules:\n  - {{keep: {keep}}}\n", "x").rules[0]


def kept(rule: Rule, shape: Shape, move: Move = lambda x: x) -> dict[Unit, Tensor]:
    """Rows that stay in two layers, whose tensors are moved before."""
    layers = [moved(make(replace(shape, seed=100 * i)), move) for i in range(2)]
    states = [_state(rule, layer, i) for i, layer in enumerate(layers)]
    return select_rule(rule, states, shape.n)


def moved(x: Any, move: Move) -> Any:
    """Every tensor in a value, moved."""
    if isinstance(x, Tensor):
        return move(x)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(x, **{f.name: moved(getattr(x, f.name), move) for f in fields(x)})
    return x


def _state(rule: Rule, layer: Layer, index: int) -> LayerState:
    specs = [spec for term in rule.keep for spec in term_scores(term)]
    inputs = prompt_inputs(
        specs, layer.q, layer.k, layer.v, scale=layer.scale, logit_cap=layer.shape.logit_cap, layer=index,
        w_o=layer.w_o, rope=layer.rope, chunk=23,
    )  # fmt: skip
    return LayerState(inputs, tuple(range(layer.shape.kv_heads)))
