"""The JSON Schema describes the text that people write: what decodes is valid, what is misshapen is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings

from kvir.policy_ir import Policy, print_policy, read
from kvir.policy_ir.schema import plain_value, policy_schema
from support import mdcase
from support.policies import policies

ROOT = Path(__file__).parents[2]
SCHEMA = policy_schema()
VALIDATOR: Any = jsonschema.Draft202012Validator(SCHEMA)
# findings about documents and spelling, which a schema does not see
SPELLING = {"KV008", "KV009", "KV010", "KV024", "KV030", "KV031"}

GOLDEN = [
    pytest.param(case.policy, id=f"{path.stem}: {case.title}")
    for path in sorted((ROOT / "tests" / "golden").glob("*.md"))
    for case in mdcase.cases(path.read_text(encoding="utf-8"))
    if read(case.policy).source.root is not None
]


def valid(text: str | bytes) -> bool:
    root = read(text).source.root
    assert root is not None
    return VALIDATOR.is_valid(plain_value(root))


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA
    assert SCHEMA["$defs"]["Rule"]["description"].startswith("What the selected units keep.")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.ir")), ids=lambda p: p.name)
def test_examples_are_valid(path: Path) -> None:
    root = read(path.read_bytes()).source.root
    assert root is not None
    VALIDATOR.validate(plain_value(root))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(policies())
def test_whatever_prints_is_valid(policy: Policy) -> None:
    assert valid(print_policy(policy))


@pytest.mark.parametrize("text", GOLDEN)
def test_schema_and_decoder_agree(text: bytes) -> None:
    errors = {d.code for d in read(text).report}
    if not errors:
        assert valid(text)
    elif not errors & SPELLING:
        assert not valid(text), errors
