"""Plan files round-trip, are replaced whole or not at all, and are trusted in nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvir.lowering import plan_file
from kvir.lowering.load import plan_for_server
from kvir.lowering.pipeline import lower
from kvir.lowering.stages import ExecutionPlan
from kvir.policy_ir import Policy, PolicyError, Report, Source, print_policy
from kvir.policy_ir.nodes import Recent, Rule, Sink
from support.models import CONFIGS, config_model

POLICY = Policy(kvir=1, name="p", rules=(Rule(keep=(Sink(tokens=4), Recent(tokens=64))),))
TINY = CONFIGS / "tiny-llama"


def plan() -> ExecutionPlan:
    return lower(POLICY, config_model("tiny-llama"), dtype="float32")


DATA = plan_file.encode(plan())


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan_file.save(plan(), path)
    assert plan_file.load(path, model=config_model("tiny-llama"), dtype="float32", device="cpu") == plan()
    assert path.read_bytes() == DATA
    assert plan_file.is_plan(DATA)


def test_the_server_takes_a_policy_or_its_plan(tmp_path: Path) -> None:
    policy, planned = tmp_path / "p.ir", tmp_path / "p.json"
    policy.write_text(print_policy(POLICY))
    plan_file.save(plan(), planned)
    assert plan_for_server(policy, TINY, dtype="float32") == plan_for_server(planned, TINY, dtype="float32")
    assert not plan_file.is_plan(policy.read_bytes())


def test_the_server_is_told_everything_at_once(tmp_path: Path) -> None:
    policy = tmp_path / "p.ir"
    policy.write_text("kvir: 1\nname: p\nrules:\n  - {layers: 9, keep: all}\n  - {heads: 9, keep: all}\n")
    with pytest.raises(PolicyError) as caught:
        plan_for_server(policy, TINY, dtype="float32")
    assert {"error[KV203]", "error[KV204]"} <= set(str(caught.value).replace(":", " ").split())
    assert f"{policy}:5:" in str(caught.value)


def test_the_server_hears_warnings(tmp_path: Path) -> None:
    policy = tmp_path / "p.ir"
    policy.write_text("kvir: 1\nname: p\nrules:\n  - {keep: [{recent: 8}]}\n  - {keep: all}\n")
    warnings: list[Report] = []
    plan_for_server(policy, TINY, dtype="float32", warnings=warnings)
    assert [d.code for report in warnings for d in report] == ["KV208"]


@pytest.mark.parametrize("missing", ["policy", "model"])
def test_what_is_missing_is_named(missing: str, tmp_path: Path) -> None:
    policy = tmp_path / "p.ir"
    if missing == "model":
        policy.write_text(print_policy(POLICY))
    model = TINY if missing == "policy" else tmp_path / "nowhere"
    with pytest.raises(PolicyError, match=str(policy if missing == "policy" else model)):
        plan_for_server(policy, model, dtype="float32")


def test_a_plan_for_other_pages_is_refused(tmp_path: Path) -> None:
    plan_file.save(plan(), tmp_path / "p.json")
    with pytest.raises(PolicyError, match="pages of 16 tokens, not 32"):
        plan_for_server(tmp_path / "p.json", TINY, dtype="float32", page_tokens=32)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(DATA) - 1), st.binary(max_size=3), st.integers(0, 3))
def test_any_damage_is_refused_or_harmless(at: int, insert: bytes, cut: int) -> None:
    damaged = DATA[:at] + insert + DATA[at + cut :]
    try:
        loaded = plan_file.decode(damaged, Report(Source("plan.json", "")))
    except PolicyError:
        return
    # white space, or text that says the same or names something
    assert loaded.layout.classes == plan().layout.classes
    assert loaded.budgeted.prefill == plan().budgeted.prefill


def test_deep_nesting_is_refused() -> None:
    deep = b'{"kvir_version":' + b"[" * 100_000
    with pytest.raises(PolicyError, match="KV601"):
        plan_file.decode(deep, Report(Source("plan.json", "")))


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"old")

    def fail(fd: int) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            plan_file.save(plan(), path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    plan_file.save(plan(), path)
    assert path.read_bytes() == DATA
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
