"""Text and structs say the same thing, both ways."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from kvir.policy_ir import (
    Policy,
    PolicyBuilder,
    PolicyError,
    encode,
    load,
    parse,
    print_policy,
    recent,
    sink,
    top_k,
    top_p,
)
from kvir.policy_ir.nodes import All, IndexRange, Recent, Rule, Sink
from kvir.policy_ir.rules import Every, Merge, PrefillEnd
from kvir.policy_ir.scores import Attention, LaProx, Rkv
from support.policies import policies

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").rglob("*.ir"))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(policies())
def test_what_is_printed_reads_back_equal(policy: Policy) -> None:
    text = print_policy(policy)
    assert parse(text) == policy
    assert print_policy(parse(text)) == text


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(policies())
def test_encoded_policies_read_back_equal(policy: Policy) -> None:
    assert msgspec.json.decode(encode(policy), type=Policy) == policy


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_read_print_and_read_back(path: Path) -> None:
    policy = load(path)
    assert parse(print_policy(policy)) == policy
    assert path.read_text().startswith("# "), "the first line says which method the example is"


def test_no_example_is_lost() -> None:
    assert {p.name for p in EXAMPLES} >= {
        "identity.ir",
        "streaming.ir",
        "layer_ramp.ir",
        "retrieval_heads.ir",
        "headwise_gemma3.ir",
        "headwise_smollm2.ir",
        "headwise_smollm2_quarter.ir",
    }


def test_json_is_policy_text() -> None:
    text = '{"kvir": 1, "name": "x", "rules": [{"keep": [{"sink": 4}, {"recent": 64}], "layers": "0..3"}]}'
    rule = Rule(keep=(Sink(tokens=4), Recent(tokens=64)), layers=(IndexRange(first=0, last=3),))
    assert parse(text) == Policy(kvir=1, name="x", rules=(rule,))


def test_builder_makes_what_text_says() -> None:
    text = """
    kvir: 1
    name: long-chat
    model: {layers: 32, kv_heads: 8}
    windows: {sink: 4, table: [[64, full], [full, 128]]}
    rules:
      - keep: [{sink: 4}, {recent: 1024}]
      - {layers: 0..3, keep: all}
      - {layers: [13..18, 20], heads: [2, 5], phase: decode, keep: {recent: 64}}
    provenance: {tool: by hand, version: "1", samples: 2}
    """
    built = (
        PolicyBuilder("long-chat")
        .model(layers=32, kv_heads=8)
        .windows([[64, None], [None, 128]], sink=4)
        .rule([sink(4), recent(1024)])
        .rule("all", layers=range(4))
        .rule(recent(64), layers=["13..18", 20], heads=[2, 5], phase="decode")
        .provenance("by hand", "1", samples=2)
        .build()
    )
    assert built == parse(text)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_the_builder_makes_every_example(path: Path) -> None:
    policy = load(path)
    assert rebuilt(policy) == policy


def rebuilt(policy: Policy) -> Policy:
    """The policy, made again by the calls of a Python program."""
    builder = PolicyBuilder(policy.name)
    if policy.model is not None:
        builder.model(**msgspec.structs.asdict(policy.model))
    if policy.windows is not None:
        builder.windows(policy.windows.table, sink=policy.windows.sink)
    for rule in policy.rules:
        fields = msgspec.structs.asdict(rule)
        for name in ("layers", "heads"):
            ranges = fields[name]
            fields[name] = None if ranges is None else [range(r.first, r.last + 1) for r in ranges]
        builder.rule(**fields)
    if policy.provenance is not None:
        builder.provenance(**msgspec.structs.asdict(policy.provenance))
    return builder.build()


def test_builder_selects_by_score() -> None:
    text = """
    kvir: 1
    name: x
    rules:
      - keep: [{recent: 32}, {top_k: {tokens: 512, by: {attention: {window: 64}}, scope: layer, floor: 16}}]
        trigger: prefill_end
      - {keep: {top_k: {fraction: 0.25, by: laprox, counts: kept}}, overflow: merge}
      - {keep: {top_p: {mass: 0.9, by: rkv, of: attention, cap: 64}}, trigger: [prefill_end, {every: 8}]}
    """
    built = (
        PolicyBuilder("x")
        .rule(
            [recent(32), top_k(512, Attention(window=64), scope="layer", floor=16)],
            trigger=PrefillEnd(),
        )
        .rule(top_k(0.25, LaProx(), counts="kept"), overflow=Merge())
        .rule(top_p(0.9, Rkv(), of=Attention(), cap=64), trigger=[PrefillEnd(), Every(tokens=8)])
        .build()
    )
    assert built == parse(text)


def test_builder_refuses_what_text_could_not_say() -> None:
    with pytest.raises(PolicyError) as caught:
        PolicyBuilder("x").rule([recent(0)]).rule(All(), layers=70000).build()
    assert [d.code for d in caught.value.report] == ["KV023", "KV023"]
    assert "`70000` is out of range" in str(caught.value)
    with pytest.raises(ValueError, match="not a run"):
        PolicyBuilder("x").rule("all", layers=range(0, 8, 2))
    with pytest.raises(ValueError, match='"all" or terms'):
        PolicyBuilder("x").rule("everything")
