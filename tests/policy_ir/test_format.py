"""`kvir fmt`: canonical layout, the same policy, every comment."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvir.policy_ir import Policy, PolicyError, parse, print_policy
from kvir.policy_ir.format import format_text
from support.policies import policies

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.ir"))

MESSY = """\
# about the file
# in two lines

name: x   # the name
kvir: 1
model: {arch: llama,   # inner
   layers: 32}
rules:       # head of rules

  # before the first
  - {preset: snapkv, layers: [0..3], heads: "1..1"}   # trailing
  - preset: {h2o: {tokens: 99}} # after a preset
    # before trigger
    trigger: [{every: {tokens: 4}}]
  - keep: [{sink: +4},   # sink
           {recent: {tokens: 64}}, {top_k: {by: {attention: {pool: {max: 7}, window: 32}}, fraction: 2.5e-1}}]
    # last in rule
  - keep:
      - sink: 4
      - recent: 5
windows:
  table:
    - [64, full] # row 0
    # row one
    - [1,
       2]
    # the end of the table
  sink: 4
# footer
"""

TIDY = """\
# about the file
# in two lines
kvir: 1
name: x  # the name
model:
  arch: llama  # inner
  layers: 32
windows:
  # the end of the table
  sink: 4
  table:
    - [64, full]  # row 0
    # row one
    - [1, 2]
rules:  # head of rules
  # before the first
  - {layers: 0..3, heads: 1, preset: snapkv}  # trailing
  - preset: {h2o: {tokens: 99}}  # after a preset
    # before trigger
    trigger: {every: 4}
  - keep:
      - {sink: 4}  # sink
      - {recent: 64}
      - {top_k: {fraction: 0.25, by: {attention: {window: 32, pool: {max: 7}}}}}
  # last in rule
  - keep: [{sink: 4}, {recent: 5}]
# footer
"""


def test_a_messy_file_becomes_tidy() -> None:
    assert format_text(MESSY) == TIDY
    assert format_text(TIDY) == TIDY
    assert parse(TIDY) == parse(MESSY)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_are_formatted(path: Path) -> None:
    text = path.read_text()
    assert format_text(text, path.name) == text


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(PolicyError, match="KV020"):
        format_text("kvir: 1\nname: x\nnmae: y\n")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(policies())
def test_without_comments_it_prints_as_the_printer(policy: Policy) -> None:
    text = print_policy(policy)
    assert format_text(text) == text


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(policies(), st.data())
def test_comments_survive_anywhere(policy: Policy, data: st.DataObject) -> None:
    lines: list[str] = []
    count = 0
    for line in print_policy(policy).splitlines():
        if data.draw(st.booleans()):
            lines.append(f"{' ' * data.draw(st.integers(0, 6))}# <{count}> {{x: 'y'}} # z")
            count += 1
        if data.draw(st.booleans()):
            line += f"  # <{count}>"
            count += 1
        lines.append(line)
    text = "\n".join([*lines, ""])
    formatted = format_text(text)
    assert parse(formatted) == policy
    assert sorted(re.findall(r"# <(\d+)>", formatted)) == sorted(str(i) for i in range(count))
    assert format_text(formatted) == formatted
