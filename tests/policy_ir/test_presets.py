"""Presets are the methods they are named after: the example of a method says the same in plain terms."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvir.lowering.verify import verified_errors
from kvir.policy_ir import load, parse, print_policy
from kvir.policy_ir.nodes import Rule
from kvir.policy_ir.shape import form

METHODS = Path(__file__).parents[2] / "examples" / "methods"
_sugar = form(Rule).sugar
assert _sugar is not None
PRESETS: dict[str, type] = getattr(_sugar.shape, "by_tag")  # noqa: B009  (one kind of shape)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_what_its_example_says(name: str) -> None:
    policy = parse(f"kvir: 1\nname: x\nrules:\n  - preset: {name}\n")
    assert policy.rules == load(METHODS / f"{name}.ir").rules
    assert parse(print_policy(policy)) == policy


@pytest.mark.parametrize("path", sorted(METHODS.glob("*.ir")), ids=lambda p: p.stem)
def test_methods_make_sense_by_themselves(path: Path) -> None:
    assert verified_errors(load(path)) == []


def test_parameters_reach_the_terms() -> None:
    policy = parse("kvir: 1\nname: x\nrules:\n  - preset: {h2o: {tokens: 99, recent: 7}}\n")
    assert "keep: [{recent: 7}, {top_k: {tokens: 99," in print_policy(policy)


def test_the_rule_wins_over_its_preset() -> None:
    policy = parse("kvir: 1\nname: x\nrules:\n  - {preset: h2o, trigger: {every: 9}, overflow: merge}\n")
    assert "trigger: {every: 9}" in print_policy(policy)
    assert "overflow: merge" in print_policy(policy)
