"""What the runtime does not execute is refused by name when a server starts, with the stage that refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import field

from kvir.kernels.catalog import ATTEND_OPS
from kvir.lowering import plan_file
from kvir.lowering.load import plan_for_server
from kvir.lowering.pipeline import lower
from kvir.lowering.unsupported import EXECUTED, unexecuted, unsupported_by_runtime
from kvir.policy_ir import Policy, PolicyError, load, parse
from kvir.policy_ir.nodes import Node, Recent, Rule, Windows
from support.models import CONFIGS, config_model, made

ROOT = Path(__file__).parents[2]
TINY = CONFIGS / "tiny-llama"


class TopK(Node, frozen=True, tag="top_k_of_the_future"):
    tokens: int


class Tuned(Rule, frozen=True):
    moment: str | None = None
    extra: dict[str, int] = field(default_factory=dict)


class Shared(Policy, frozen=True):
    budget: int = 0


def policy(*rules: Rule) -> Policy:
    return Policy(kvir=1, name="p", rules=rules)


KEEP = (Recent(tokens=8),)
CASES: dict[str, tuple[Policy, list[tuple[str, str]]]] = {
    "term": (
        policy(Rule(keep=(*KEEP, TopK(tokens=4)))),  # type: ignore[arg-type]
        [("top_k_of_the_future", "$.rules[0].keep[1]")],
    ),
    "field of a rule": (
        policy(Rule(keep=KEEP), Tuned(keep=KEEP, moment="x")),
        [("moment", "$.rules[1].moment")],
    ),
    "mutable default": (policy(Tuned(keep=KEEP, extra={"a": 1})), [("extra", "$.rules[0].extra")]),
    "field of a policy": (Shared(kvir=1, name="p", budget=5), [("budget", "$.budget")]),
}


@pytest.mark.parametrize("name", CASES)
def test_what_nobody_taught_the_runtime_is_found(name: str) -> None:
    given, found = CASES[name]
    assert list(unexecuted(given)) == found


def test_fields_at_their_default_are_no_obstacle() -> None:
    given = Shared(kvir=1, name="p", rules=(Tuned(keep=KEEP),))
    assert list(unexecuted(given)) == []
    assert unsupported_by_runtime(lower(policy(Rule(keep=KEEP)), made(2, 2), dtype="bfloat16")) == []


def test_every_known_field_exists() -> None:
    for struct, fields in EXECUTED.items():
        assert fields <= set(struct.__struct_fields__), struct
    assert {Policy, Rule, Windows} < set(EXECUTED)


REFUSED = {
    "merge": "- {keep: [{recent: 32}, {top_k: {tokens: 64, by: key_norm}}], overflow: merge}",
    "criticalkv": "- {keep: {top_k: {preference: 64, by: {criticalkv: {base: attention}}}}}",
    "positions": "- {keep: [{sink: 4}, {recent: 64}], positions: cache}",
    "store": "- {keep: all, store: float32}",
}


@pytest.mark.parametrize("word", REFUSED)
def test_a_server_refuses_by_name_and_place(word: str, tmp_path: Path) -> None:
    path = tmp_path / "p.ir"
    path.write_text(f"kvir: 1\nname: p\nrules:\n  {REFUSED[word]}\n")
    with pytest.raises(PolicyError) as caught:
        plan_for_server(path, TINY, dtype="float32")
    found = next(d for d in caught.value.report if d.code == "KV310")
    assert f"does not execute `{word}` (refused by the stage `runtime`)" in found.message
    assert f"{path}:4:" in str(caught.value)


def test_a_server_refuses_plans_as_it_refuses_policies(tmp_path: Path) -> None:
    plan = lower(load(ROOT / "examples/methods/h2o.ir"), config_model("tiny-llama"), dtype="float32")
    plan_file.save(plan, tmp_path / "p.json")
    with pytest.raises(PolicyError, match=r"does not execute `accumulated`.*refused by the stage `runtime`"):
        plan_for_server(tmp_path / "p.json", TINY, dtype="float32")
    assert [x.code for x in unsupported_by_runtime(plan)] == ["KV310"]


def test_windows_in_decode_over_chosen_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.ir"
    path.write_text(
        "kvir: 1\nname: p\nrules:\n"
        "  - {phase: prefill, keep: [{recent: 32}, {top_k: {tokens: 64, by: attention}}]}\n"
        "  - {phase: decode, layers: 1, keep: [{recent: 32}]}\n"
    )
    with pytest.raises(PolicyError, match="a window in decode over rows that prefill chose by score"):
        plan_for_server(path, TINY, dtype="float32")


SELECTING = {
    "after the server's own chunks": "{keep: {top_k: {tokens: 64, by: key_norm}}, trigger: prefill_chunk}",
    "after part of a page": "{keep: {top_k: {tokens: 64, by: key_norm}}, "
    "trigger: {prefill_chunk: {tokens: 100}}}",
    "`prefill_chunk` where heads keep different": "{keep: {top_p: {mass: 0.9, by: attention}}, "
    "trigger: {prefill_chunk: {tokens: 64}}}",
    "`accumulated`, a sum over queries, while decoding": "{keep: {top_k: {tokens: 64, by: accumulated}}, "
    "trigger: {every: 8}}",
    "`over` where heads keep different numbers": "{keep: {top_p: {mass: 0.9, by: attention}}, "
    "trigger: {over: 512}}",
    "a choice among all layers while decoding": "{keep: {top_k: {tokens: 64, by: key_norm, scope: model}}, "
    "trigger: {every: 8}}",
}


@pytest.mark.parametrize("message", SELECTING)
def test_how_rows_cannot_be_selected_is_refused(message: str, tmp_path: Path) -> None:
    path = tmp_path / "p.ir"
    path.write_text(f"kvir: 1\nname: p\nrules:\n  - {SELECTING[message]}\n")
    with pytest.raises(PolicyError, match=message):
        plan_for_server(path, TINY, dtype="float32")


@pytest.mark.parametrize(
    "name", ["snapkv", "pyramidkv", "adakv", "laprox", "criticalkv", "cake", "lagkv", "rkv", "hardkv", "tova"]
)
def test_methods_by_score_are_served(name: str) -> None:
    plan = plan_for_server(ROOT / f"examples/methods/{name}.ir", CONFIGS / "llama-3.1-8b", dtype="bfloat16")
    assert plan.layout.compact


@pytest.mark.parametrize(
    ("score", "sums", "scores"),
    [(None, None, None), ("key_diff", None, "ref"), ("accumulated", "triton", "ref")],
)
def test_rows_by_score_are_served_on_cuda(
    score: str | None, sums: str | None, scores: str | None, tmp_path: Path
) -> None:
    """Whole prompts by FlashInfer, sums over all queries by Triton, what is done once per prompt in torch."""
    keep = "all" if score is None else f"{{top_k: {{tokens: 64, by: {score}}}}}"
    path = tmp_path / "p.ir"
    path.write_text(f"kvir: 1\nname: p\nrules: [{{keep: {keep}}}]\n")
    plan = plan_for_server(path, CONFIGS / "llama-3.1-8b", dtype="bfloat16", device="cuda")
    ops = {choice.op: choice.implementation for choice in plan.choices}
    assert [ops[op] for op in ATTEND_OPS] == ["triton", "triton", "flashinfer"]
    assert (ops.get("sum"), ops.get("score")) == (sums, scores)
    assert plan.buckets.decode


def test_prompts_are_whole_whatever_selects_at_their_end(tmp_path: Path) -> None:
    """Heads of a layer that select by different rules have no windows, so a layer is FlashInfer's."""
    path = tmp_path / "p.ir"
    rules = (
        f"{{heads: {head}, keep: {{top_k: {{tokens: {64 + head}, by: {by}}}}}}}"
        for head, by in enumerate(("key_diff", "last_query"))
    )
    path.write_text(f"kvir: 1\nname: p\nrules: [{', '.join(rules)}]\n")
    plan = plan_for_server(path, CONFIGS / "llama-3.1-8b", dtype="bfloat16", device="cuda")
    chosen = {choice.op: (choice.implementation, choice.layers) for choice in plan.choices}
    assert chosen["attend_extend"] == ("flashinfer", None)
    assert chosen["compact"] == ("triton", None)


def test_attention_that_no_kernel_computes_yet_is_refused_on_cuda() -> None:
    given = CONFIGS / "gpt-oss-20b", "bfloat16", "cuda"
    with pytest.raises(PolicyError, match=r"kernels for cuda are not built yet: `attend_decode` \(triton\)"):
        plan_for_server(ROOT / "examples/identity.ir", given[0], dtype=given[1], device=given[2])


def test_layers_without_a_cache_are_planned_and_not_served(tmp_path: Path) -> None:
    path = tmp_path / "p.ir"
    path.write_text("kvir: 1\nname: p\n")
    assert lower(parse(path.read_text()), config_model("qwen3-next-80b"), dtype="bfloat16").layout.unit_count
    with pytest.raises(PolicyError, match="36 of 48 in this one; refused by the stage `runtime`"):
        plan_for_server(path, CONFIGS / "qwen3-next-80b", dtype="bfloat16")


def test_windows_may_differ_between_the_phases() -> None:
    given = parse(
        "kvir: 1\nname: p\nrules:\n  - keep: [{recent: 64}]\n  - {phase: decode, keep: [{recent: 32}]}\n"
    )
    assert unsupported_by_runtime(lower(given, made(2, 2), dtype="bfloat16")) == []
