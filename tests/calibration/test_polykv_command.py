"""`kvir calibrate polykv` from the command line."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvir.calibration.polykv import result
from kvir.calibration.polykv.deploy import executed
from kvir.calibration.polykv.methods import DEFAULT, TERMS
from kvir.cli import main
from kvir.cli_parser import parser
from kvir.lowering import footprint
from kvir.lowering.model_facts import load_model
from kvir.lowering.pipeline import lower
from kvir.policy_ir import load
from support.fresh import run_python
from support.tiny import TEXT

Folder = Callable[[str], Path]
METHODS = "streaming,snapkv,h2o,keydiff,laprox"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT * 2, encoding="utf-8")
    return path


def words(model: Path, text: Path, output: Path, *more: str) -> list[str]:
    return [
        *("calibrate", "polykv", "--model", str(model), "--text", str(text), "--context", "300"),
        *("--continuation", "24", "--samples", "2", "--retrieval", "0", "--methods", METHODS),
        *("--sinks", "2", "--recent", "6", "--budgets", ".1,.5", "--held-out-samples", "2"),
        *("--query-stride", "6", "-o", str(output), *more),
    ]


@pytest.mark.parametrize(
    ("family", "grain"), [("gemma3", "head"), ("llama", "layer"), ("qwen3-next", "head")]
)
def test_the_plan_is_what_the_grid_says(
    family: str, grain: str, model_folder: Folder, text: Path, tmp_path: Path
) -> None:
    output, model = tmp_path / "plan.ir", load_model(model_folder(family))
    assert main(words(model_folder(family), text, output, "--grain", grain)) == 0
    assert not list(tmp_path.glob("*unfinished*"))
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    found = result.read(output.with_suffix(".json").read_bytes())
    layout = lower(load(output), model, dtype="float32").layout
    units = [c.rows for row in found.choices for c in row]
    assert sum(units) <= 0.25 * 300 * len(units)
    assert sum(units) > 0.25 * 300 * len(units) - len(units), "the budget is spent"
    assert min(units) >= found.inputs.minimum_rows == 8
    assert found.plan is not None
    assert found.plan.kept_share == pytest.approx(sum(units) / len(units) / 300, abs=0.004)
    assert all(point.kept_share == pytest.approx(0.25, abs=0.004) for point in found.singles)
    plan = executed(load(output), model)
    assert list(plan) == list(found.layers)
    for layer_id, row in zip(found.layers, found.choices, strict=True):
        for head, choice in enumerate(row if grain == "head" else row * 2):
            rules = [rule for rule, heads in plan[layer_id].selections if head in heads]
            windows = [recent for _, recent, heads in plan[layer_id].windows if head in heads]
            if choice.rows == 300:
                assert not rules
                assert not windows
            elif found.methods[choice.method].name == "streaming":
                assert windows == [choice.rows - 2]
            else:
                (rule,) = rules
                assert f"share: {choice.rows / 300:.2g}"[:9] in str(msgspec.to_builtins(rule)).replace(
                    "'", ""
                )
    done = footprint.done_pages(layout, 300)
    assert done.most < footprint.full_pages(layout, 300)


def test_the_same_command_gives_the_same_files(model_folder: Folder, text: Path, tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        output = tmp_path / name / "plan.ir"
        assert main(words(model_folder("gemma2"), text, output)) == 0
        made.append(
            [
                output.read_text().replace(f"/{name}/", "/"),
                *(output.with_suffix(s).read_bytes() for s in (".json", ".png")),
            ]
        )
    assert made[0] == made[1]
    command = made[0][0].splitlines()[1].removeprefix("# ")
    again = tmp_path / "c.ir"
    assert main([*shlex.split(command)[1:-1], str(again)]) == 0
    assert again.with_suffix(".json").read_bytes() == made[0][1]
    assert main(["plot", str(again.with_suffix(".json")), "-o", str(tmp_path / "again.png")]) == 0
    assert (tmp_path / "again.png").read_bytes() == made[0][2]


def test_retrieval_and_a_method_of_ones_own(model_folder: Folder, tmp_path: Path) -> None:
    text, output, own = tmp_path / "t.txt", tmp_path / "plan.ir", tmp_path / "mine.ir"
    text.write_text(TEXT * 3)
    own.write_text(
        "kvir: 1\nname: mine\nrules:\n"
        "  - keep: [{sink: 1}, {recent: 3}, {top_k: {tokens: 9, by: {key_norm: {norm: l1}}}}]\n"
    )
    more = (
        *("--context", "1000", "--continuation", "200", "--retrieval", "2", "--retrieval-weight", "2"),
        *("--methods", f"snapkv,{own}", "--samples", "1", "--held-out-samples", "0", "--query-stride", "40"),
    )
    assert main(words(model_folder("llama"), text, output, *more)) == 0
    found = result.read(output.with_suffix(".json").read_bytes())
    assert [method.name for method in found.methods] == ["snapkv", "mine"]
    assert "norm: l1" in found.methods[1].rule
    assert (found.full, found.plan, found.singles) == (None, None, ())
    assert found.inputs.retrieval_samples == 2
    assert load(output).provenance is not None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--methods", "snapkw"), "unknown method `snapkw`; known: streaming, snapkv"),
        (("--methods", ","), "--methods names none"),
        (("--budget", ".01"), "is not between the minimum of 8 rows and all"),
        (("--minimum", "3"), "less than the 8 sinks and recent rows"),
        (("--samples", "900"), "give a longer text"),
        (("--retrieval", "1"), "too little text or context"),
        (("--continuation", "1"), "--continuation at least 2"),
        (("--retrieval-weight", "-1"), "at least 0"),
    ],
)
def test_what_does_not_fit_is_explained(
    more: tuple[str, ...],
    message: str,
    model_folder: Folder,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(words(model_folder("llama"), text, tmp_path / "plan.ir", *more)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "plan.ir").exists()


def test_a_file_that_is_no_method_is_refused(
    model_folder: Folder, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "mine.ir"
    own.write_text("kvir: 1\nname: mine\nrules:\n  - keep: {top_k: {tokens: 9, by: laprox, scope: model}}\n")
    assert main(words(model_folder("llama"), text, tmp_path / "plan.ir", "--methods", str(own))) == 2
    assert "one `top_k` that looks at one layer" in capsys.readouterr().err


def test_the_methods_of_the_help_are_those_there_are() -> None:
    bare = ["calibrate", "polykv", "--model", "", "--text", "", "-o", ""]
    args = parser().parse_args(bare)
    assert tuple(args.methods.split(",")) == DEFAULT
    named = re.sub(r"\s+", "", parser_help())  # a long word is broken anywhere
    assert all(name in named for name in TERMS)


def parser_help() -> str:
    code = "from kvir.cli_parser import parser; parser().parse_args(['calibrate', 'polykv', '--help'])"
    return run_python(code)


def test_control_c_and_the_same_command_again(model_folder: Folder, text: Path, tmp_path: Path) -> None:
    output, unfinished = tmp_path / "plan.ir", tmp_path / ".plan.ir.unfinished"
    command = words(model_folder("llama"), text, output, "--samples", "6")
    run = [sys.executable, "-m", "kvir", *command]
    # a shell's background jobs ignore SIGINT, and children inherit that
    heard = "import signal, sys, os; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    start = [sys.executable, "-c", heard + "os.execv(sys.argv[1], sys.argv[1:])", *run]
    process = subprocess.Popen(start, stderr=subprocess.PIPE, text=True)
    while not unfinished.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert "goes on from the last finished layer" in process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert not output.exists()
    assert main(command) == 0
    assert not unfinished.exists()
    (tmp_path / "whole").mkdir()
    whole = tmp_path / "whole/plan.ir"
    assert main(words(model_folder("llama"), text, whole, "--samples", "6")) == 0
    assert whole.with_suffix(".json").read_bytes() == output.with_suffix(".json").read_bytes()
