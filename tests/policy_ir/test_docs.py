"""The documents are current, and their examples are policies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvir.lowering.verify import Verify
from kvir.policy_ir import PolicyBuilder, parse, print_policy, read, recent, render, sink
from kvir.policy_ir.nodes import Rule, TopK
from kvir.policy_ir.reference import as_markdown, field_comments
from kvir.policy_ir.shape import OneOf, form

ROOT = Path(__file__).parents[2]
LANGUAGE = (ROOT / "docs" / "language.md").read_text()
BLOCKS = re.findall(r"^```yaml\n(.*?)^```$", LANGUAGE, re.MULTILINE | re.DOTALL)


def test_the_reference_is_current() -> None:
    page = (ROOT / "docs" / "reference.md").read_text()
    assert page == as_markdown(), "run: python -m kvir.policy_ir.reference > docs/reference.md"


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.split("\n")[0][:30])
def test_examples_of_the_guide_are_policies(block: str) -> None:
    head = "" if block.startswith("kvir:") else "kvir: 1\nname: x\n"
    head += "rules:\n" if block.startswith("  - ") else ""
    policy, report, _ = read(head + block)
    assert policy is not None, render.full(report)
    Verify(report)(policy)
    assert len(report) == 0, render.full(report)


def test_the_guide_names_every_term_score_budget_and_preset() -> None:
    sugar = form(Rule).sugar
    assert sugar is not None
    unions = [form(TopK).fields["by"].shape, form(TopK).fields["budget"].shape, sugar.shape]
    for union in unions:
        assert isinstance(union, OneOf)
        missing = [tag for tag in union.by_tag if f"`{tag}`" not in LANGUAGE and f"`{tag}:" not in LANGUAGE]
        assert missing == []


def test_the_builder_of_the_guide_works() -> None:
    policy = PolicyBuilder("long-chat").rule([sink(4), recent(1024)]).rule("all", layers="0..3").build()
    assert parse(print_policy(policy)) == policy


def test_comments_of_fields_are_found() -> None:
    comments = field_comments(TopK)
    assert comments["block"].startswith("rows are taken in aligned blocks")
    assert (
        comments["scope"] == "units that compete for one common budget, the budget of each times their number"
    )
