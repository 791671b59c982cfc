"""Every stage is an exit and an entry: written, read back equal, and continued to the same plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvir import cli
from kvir.lowering import plan_file, spec, stage_file
from kvir.lowering.pipeline import PASSES, STAGES, lower, lower_to, stage_name
from kvir.lowering.spec import AnyStage
from kvir.lowering.stages import ExecutionPlan
from kvir.policy_ir import PolicyError, Report, Source, load
from support.examples import EXAMPLES, model_of
from support.models import CONFIGS

TINY = str(CONFIGS / "tiny-llama")
POLICY = "kvir: 1\nname: good\nrules:\n  - keep: [{sink: 4}, {recent: 64}]\n  - {layers: 0, preset: snapkv}\n"


def read(data: bytes) -> AnyStage:
    return stage_file.decode(data, Report(Source("stage.json", "")))


def planned(path: Path, device: str = "cpu") -> ExecutionPlan:
    return lower(load(path), model_of(path), dtype="bfloat16", device=device)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_every_stage_of_every_example_reads_back_and_goes_on(path: Path) -> None:
    plan = planned(path)
    stages = spec.every_stage(plan)
    assert [stage_name(stage) for stage in stages] == list(PASSES)
    for stage in stages:
        data = stage_file.encode(stage)
        again = read(data)
        assert again == stage
        assert stage_file.encode(again) == data
        assert stage_file.stage_in(data) == stage_name(stage)
        assert lower_to("plan", again, model_of(path), dtype="bfloat16") == plan


@pytest.mark.parametrize("start", PASSES)
@pytest.mark.parametrize("to", PASSES)
def test_the_command_goes_from_any_stage_to_any_later_one(
    start: str, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, stage, out = (str(tmp_path / name) for name in ("p.ir", "start.json", "end.json"))
    Path(policy).write_text(POLICY)
    model = ["--model", TINY]
    assert cli.main(["lower", policy, *model, "--to", start, "-o", stage]) == 0
    # a stage knows its model
    needed = model if start == "verify" else []
    code = cli.main(["lower", stage, "--from", start, *needed, "--to", to, "-o", out])
    if PASSES.index(to) < PASSES.index(start):
        assert code == 2
        assert f"which is past `{to}`" in capsys.readouterr().err
        return
    assert code == 0
    straight = str(tmp_path / "straight.json")
    assert cli.main(["lower", policy, *model, "--to", to, "-o", straight]) == 0
    assert Path(out).read_bytes() == Path(straight).read_bytes()


@pytest.mark.parametrize("name", PASSES)
def test_what_is_printed_after_a_pass_can_be_read_back(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "p.ir"
    policy.write_text(POLICY)
    args = ["lower", str(policy), "--model", TINY, "-o", str(tmp_path / "plan.json")]
    assert cli.main([*args, "--print-after", name, "--json"]) == 0
    head, _, text = capsys.readouterr().err.partition("\n")
    assert head.startswith(f"-- after {name} (")
    stage = read(text.encode())
    assert type(stage) is STAGES[name]
    assert lower_to(
        "plan", stage, None if name != "verify" else model_of(None), dtype="float32"
    ) == plan_file.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--from", "layout"], "holds the stage of `budget`, not the stage of `layout`"),
        (["--from", "text"], "holds the stage of `budget`, not the text of a policy"),
        (["--to", "resolve"], "holds the stage of `budget`, which is past `resolve`"),
        (["--model", str(CONFIGS / "smollm2-135m")], "is lowered for another model"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    args: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy, stage = tmp_path / "p.ir", tmp_path / "s.json"
    policy.write_text(POLICY)
    assert cli.main(["lower", str(policy), "--model", TINY, "--to", "budget", "-o", str(stage)]) == 0
    assert cli.main(["lower", str(stage), *args]) == 2
    assert words in capsys.readouterr().err


def test_settled_options_may_only_be_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy, stage = str(tmp_path / "p.ir"), str(tmp_path / "s.json")
    Path(policy).write_text(POLICY)
    args = ["--model", TINY, "--to", "kernels", "-o", stage]
    assert cli.main(["lower", policy, *args]) == 0
    same = ["--dtype", "float32", "--page-tokens", "16", "--device", "cpu"]
    assert cli.main(["lower", stage, *same, "--to", "kernels"]) == 0
    for option, value in (("--dtype", "bfloat16"), ("--page-tokens", "32"), ("--device", "h200")):
        assert cli.main(["lower", stage, option, value]) == 2
        assert f"not {value}" in capsys.readouterr().err


def test_show_takes_any_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = str(tmp_path / "p.ir")
    Path(policy).write_text(POLICY)
    assert cli.main(["show", policy, "--model", TINY]) == 0
    shown = capsys.readouterr().out
    for name in PASSES:
        stage = str(tmp_path / f"{name}.json")
        assert cli.main(["lower", policy, "--model", TINY, "--to", name, "-o", stage]) == 0
        assert cli.main(["show", stage, *(["--model", TINY] if name == "verify" else [])]) == 0
        assert capsys.readouterr().out == shown


def test_a_policy_needs_a_model_but_to_be_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = str(tmp_path / "p.ir")
    Path(policy).write_text(POLICY)
    assert cli.main(["lower", policy]) == 2
    assert "give its folder with --model" in capsys.readouterr().err
    assert cli.main(["lower", policy, "--to", "verify"]) == 0
    assert capsys.readouterr().out.startswith("kvir: 1\nname: good\n")


def test_a_json_policy_is_no_stage() -> None:
    assert stage_file.stage_in(b'{"kvir": 1, "name": "stage"}') is None
    assert stage_file.stage_in(b"kvir: 1\nname: x\n") is None


LAYOUT = stage_file.encode(planned(EXAMPLES[0]).layout)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(LAYOUT) - 1), st.binary(max_size=3), st.integers(0, 3))
def test_any_damage_is_refused_or_harmless(at: int, insert: bytes, cut: int) -> None:
    damaged = LAYOUT[:at] + insert + LAYOUT[at + cut :]
    try:
        stage = read(damaged)
    except PolicyError:
        return
    assert spec.every_stage(stage)[-1] is stage
    assert not spec.broken(stage)
