"""The page of methods names every score, and leads to every example."""

from __future__ import annotations

import re
from pathlib import Path

from kvir.policy_ir.shape import OneOf, form
from kvir.policy_ir.terms import TopK

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "methods.md").read_text()


def test_every_example_has_a_place() -> None:
    linked = set(re.findall(r"\(\.\./examples/methods/(\w+\.ir)\)", PAGE))
    assert linked == {path.name for path in (ROOT / "examples" / "methods").glob("*.ir")}


def test_every_score_is_named() -> None:
    scores = form(TopK).fields["by"].shape
    assert isinstance(scores, OneOf)
    assert [tag for tag in scores.by_tag if not re.search(rf"`\{{?{tag}\b", PAGE)] == []


def test_every_golden_method_is_in_the_table_of_agreement() -> None:
    methods = {path.stem for path in (ROOT / "tests" / "data" / "golden" / "kvpress").glob("*.ir")}
    assert set(re.findall(r"^\| (\w+) \| [\d,]{5,} \|", PAGE, re.MULTILINE)) == methods
