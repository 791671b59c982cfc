"""The pipeline as a whole: order, observation, early exit, determinism, specs that catch broken stages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from kvir.lowering import plan_file, spec
from kvir.lowering.layout import Layout
from kvir.lowering.load import plan_for_server
from kvir.lowering.pipeline import PASSES, BrokenStage, lower, lower_to
from kvir.lowering.spec import AnyStage
from kvir.lowering.stage_text import stage_text
from kvir.lowering.stages import BudgetedPolicy, ExecutionPlan, KernelChoice, LayoutPlan, Retention
from kvir.lowering.verify import MAX_RULES
from kvir.policy_ir import Policy, PolicyError, Report, Source, load
from kvir.policy_ir.nodes import All, IndexRange, Recent, Rule, Sink, Windows
from support.effort import effort
from support.models import CONFIGS, config_model, made
from support.policies import policies

ROOT = Path(__file__).parents[2]
MIXED = Policy(
    kvir=1,
    name="mixed",
    rules=(
        Rule(keep=(Sink(tokens=4), Recent(tokens=64))),
        Rule(keep=(All(),), layers=(IndexRange(first=0, last=1),), heads=(IndexRange(first=1, last=1),)),
        Rule(keep=(Recent(tokens=16),), layers=(IndexRange(first=3, last=3),), phase="decode"),
    ),
)


def plan() -> ExecutionPlan:
    return lower(MIXED, made(4, 2), dtype="bfloat16")


def test_passes_run_in_order_and_are_observed() -> None:
    seen: list[str] = []
    lower(MIXED, made(4, 2), dtype="bfloat16", observe=lambda name, stage, seconds: seen.append(name))
    assert tuple(seen) == PASSES


@pytest.mark.parametrize("name", PASSES)
def test_lowering_stops_after_any_pass(name: str) -> None:
    seen: list[str] = []
    stage = lower_to(
        name, MIXED, made(4, 2), dtype="bfloat16", observe=lambda name, stage, seconds: seen.append(name)
    )
    assert seen[-1] == name
    assert stage_text(stage)
    assert stage in spec.every_stage(plan())


def test_an_unknown_pass_is_named() -> None:
    with pytest.raises(ValueError, match="no pass `layuot`"):
        lower_to("layuot", MIXED, made(4, 2), dtype="bfloat16")


def test_a_policy_built_in_python_gets_errors_without_places() -> None:
    bad = Policy(
        kvir=1,
        name="bad",
        rules=(Rule(keep=()), Rule(keep=(Recent(tokens=1),), heads=(IndexRange(first=9, last=9),))),
    )
    with pytest.raises(PolicyError) as caught:
        lower(bad, made(4, 2), dtype="bfloat16")
    text = str(caught.value)
    assert "KV102" in text
    assert "KV203" in text
    assert "<bad>" in text


def test_too_many_rules_are_refused() -> None:
    many = Policy(kvir=1, name="many", rules=(Rule(keep=(All(),)),) * (MAX_RULES + 1))
    with pytest.raises(PolicyError, match=f"KV109.*{MAX_RULES + 1} rules; the limit is {MAX_RULES}"):
        lower(many, made(4, 2), dtype="bfloat16")


def test_a_window_for_each_head_of_a_large_model_lowers_fast() -> None:
    table = tuple(tuple(17 + 16 * (8 * i + h) for h in range(8)) for i in range(80))
    policy, model = Policy(kvir=1, name="p", windows=Windows(table=table, sink=4)), made(80, 8)
    assert len(lower(policy, model, dtype="bfloat16").layout.classes) == 640
    _, units = effort(lambda: lower(policy, model, dtype="bfloat16"), rounds=5)
    assert units < 5  # about 0.05 s; 0.8 is usual


def test_the_same_input_gives_the_same_bytes_in_every_process() -> None:
    code = (
        "import sys; from kvir.lowering import plan_file; from kvir.lowering.load import plan_for_server\n"
        "p = plan_for_server(sys.argv[1], sys.argv[2], dtype='bfloat16')\n"
        "sys.stdout.buffer.write(plan_file.encode(p))"
    )
    policy, model = ROOT / "examples/headwise_smollm2.ir", CONFIGS / "smollm2-135m"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code, str(policy), str(model)],
            capture_output=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(outputs) == 1
    assert len(outputs.pop()) > 1000


def test_the_fingerprint_follows_policy_model_and_layout() -> None:
    base = plan().fingerprint
    model = made(4, 2)
    others = [
        lower(replace(MIXED, rules=MIXED.rules[:2]), model, dtype="bfloat16"),
        lower(MIXED, model, dtype="float16"),
        lower(MIXED, model, dtype="bfloat16", page_tokens=32),
        lower(MIXED, made(5, 2), dtype="bfloat16"),
    ]
    assert len({base, *(p.fingerprint for p in others)}) == 5
    assert lower(MIXED, model, dtype="bfloat16").fingerprint == base


@settings(max_examples=150, deadline=None)
@given(policies())
def test_any_policy_lowers_soundly_or_is_refused_with_diagnostics(policy: Policy) -> None:
    report = Report(Source("p", ""))
    try:
        made_plan = lower(policy, made(3, 2, windows=(None, 32)), dtype="bfloat16", report=report)
    except PolicyError:
        assert report.error_count > 0
    else:
        assert report.error_count == 0
        for stage in spec.every_stage(made_plan):
            assert spec.broken(stage) == []
        assert plan_file.decode(plan_file.encode(made_plan), report) == made_plan


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ir")), ids=lambda p: p.stem)
def test_every_example_lowers_for_some_model(path: Path) -> None:
    policy = load(path)
    plans, refusals, warnings = [], set[str](), set[str]()
    for name in ("smollm2-135m", "llama-3.1-8b", "gemma-3-270m"):
        try:
            plans.append(plan_for_server(path, CONFIGS / name, dtype="bfloat16"))
        except PolicyError as error:
            refusals |= {d.code for d in error.report if d.severity == "error"}
            warnings |= {d.code for d in error.report if d.severity != "error"}
    assert plans
    assert all(p.policy == policy for p in plans)
    assert refusals <= {"KV203", "KV204", "KV205", "KV206", "KV207"}
    assert warnings <= {"KV303"}  # refused for Gemma, whose sliding layers have nothing to select


# ---- specs -------------------------------------------------------------------------------------------------


def edits() -> dict[str, tuple[Callable[[ExecutionPlan], AnyStage], str]]:
    """One broken stage per rule of the specs: how to make it from a sound plan, and what the spec says."""
    wrong = Retention(sink_tokens=0, recent_tokens=5)

    def budgeted(p: ExecutionPlan, **change: object) -> BudgetedPolicy:
        return replace(p.budgeted, **change)

    def layout(p: ExecutionPlan, **change: object) -> LayoutPlan:
        return replace(p.layout, **change)

    first = plan().layout.classes[0]
    return {
        "rule": (
            lambda p: replace(p.budgeted.bound.verified, policy=replace(p.policy, rules=(Rule(keep=()),))),
            "`keep` is empty",
        ),
        "governing": (lambda p: replace(p.budgeted.bound, decode_rule=((0, 0),) * 4), "rules of decode"),
        "model": (
            lambda p: replace(p.budgeted.bound, model=replace(p.model, fingerprint="0" * 64)),
            "fingerprint",
        ),
        "layers": (lambda p: replace(p.budgeted.bound, model=replace(p.model, layer_count=3)), "layers"),
        "context": (lambda p: replace(p.budgeted.bound, model=replace(p.model, context_tokens=0)), "context"),
        "prefill": (lambda p: budgeted(p, prefill=((wrong, wrong),) * 4), "retentions of prefill"),
        "decode": (lambda p: budgeted(p, decode=p.budgeted.prefill[::-1]), "decode keeps rows"),
        "heads": (lambda p: layout(p, kv_heads=1), "are not the model's"),
        "units": (lambda p: layout(p, unit_count=9), "unit_count"),
        "page": (lambda p: layout(p, page_tokens=12), "page_tokens"),
        "classes": (lambda p: layout(p, classes=p.layout.classes[::-1]), "classes do not group"),
        "partition": (lambda p: layout(p, classes=(first, *p.layout.classes)), "partition"),
        "bytes": (lambda p: layout(p, head_page_bytes=1), "head_page_bytes"),
        "dtype": (lambda p: layout(p, dtype="float32"), "head_page_bytes"),
        "table": (lambda p: layout(p, table_bytes_per_page=1), "table_bytes_per_page"),
        "ratio": (lambda p: layout(p, logical_ratio=63), "logical_ratio"),
        "device": (lambda p: replace(p.buckets.kernels, device="npu"), "unknown device"),
        "kernel": (
            lambda p: replace(
                p.buckets.kernels, choices=(KernelChoice(op="append", implementation="rm", rejected=()),)
            ),
            "catalogue",
        ),
        "format": (lambda p: replace(p, format=2), "format is 2"),
        "version": (lambda p: replace(p, kvir_version="0"), "made by kvir 0"),
        "fingerprint": (lambda p: replace(p, fingerprint=""), "fingerprint"),
    }


@pytest.mark.parametrize("name", edits())
def test_the_spec_names_what_is_broken(name: str) -> None:
    edit, words = edits()[name]
    sound = plan()
    assert all(spec.broken(stage) == [] for stage in spec.every_stage(sound))
    assert words in "; ".join(spec.broken(edit(sound)))


def test_a_pass_that_breaks_its_stage_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Layout.__call__

    def sloppy(self: Layout, budgeted: BudgetedPolicy) -> LayoutPlan:
        return replace(original(self, budgeted), logical_ratio=0)

    monkeypatch.setattr(Layout, "__call__", sloppy)
    with pytest.raises(BrokenStage, match="pass `layout` broke its stage: logical_ratio"):
        plan()


def test_different_windows_everywhere_are_exact() -> None:
    """80 x 8 units, a window of its own each."""
    table = tuple(tuple(17 + 16 * (8 * i + h) for h in range(8)) for i in range(80))
    big = lower(
        Policy(kvir=1, name="t", windows=Windows(table=table, sink=4)),
        made(80, 8, head_dim=128),
        dtype="bfloat16",
    )
    assert len(big.layout.classes) == 640
    assert [c.window_pages for c in big.layout.classes] == list(range(640, 0, -1))
    assert [c.units for c in big.layout.classes] == [(u,) for u in range(639, -1, -1)]


def test_smollm_is_planned_in_its_own_dtype() -> None:
    model = config_model("smollm2-135m")
    layout = lower(Policy(kvir=1, name="id"), model, dtype=model.dtype).layout
    assert (layout.unit_count, layout.head_page_bytes) == (90, 2 * 16 * 64 * 2)
