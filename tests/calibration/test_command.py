"""`kvir calibrate` and `kvir plot` from the command line."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvir.calibration import result
from kvir.calibration.candidates import FULL
from kvir.cli import main
from kvir.lowering.model_facts import load_model
from kvir.lowering.pipeline import lower
from kvir.lowering.stages import DTYPE_BYTES
from kvir.policy_ir import load
from support.fresh import run_python
from support.tiny import TEXT

Folder = Callable[[str], Path]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def words(model: Path, text: Path, output: Path, *more: str) -> list[str]:
    return [
        *("calibrate", "seqcalib", "--model", str(model), "--text", str(text), "--context", "96"),
        *("--candidates", "8,16,32", "--tau", ".8,.95", "--held-out-samples", "1", "-o", str(output), *more),
    ]


def calibrated(model: Path, text: Path, output: Path, *more: str) -> result.Calibration:
    """The grid beside the plan that the command wrote."""
    assert main(words(model, text, output, *more)) == 0
    return result.read(output.with_suffix(".json").read_bytes())


def test_the_same_input_gives_the_same_files(model_folder: Folder, text: Path, tmp_path: Path) -> None:
    made = []
    for _ in range(2):
        assert main(words(model_folder("gemma3"), text, tmp_path / "plan.ir")) == 0
        made.append([(tmp_path / f"plan.{ending}").read_bytes() for ending in ("ir", "json", "png")])
    assert made[0] == made[1]
    assert not list(tmp_path.glob("*unfinished*"))
    assert made[0][2].startswith(b"\x89PNG")


def test_the_plan_says_what_the_grid_says(model_folder: Folder, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.ir"
    found = calibrated(model_folder("gemma3"), text, output, "--sinks", "2")
    model = load_model(model_folder("gemma3"))
    plan = lower(load(output), model, dtype="float32")
    assert found.layers == (1, 2), "the sliding layer is not configurable"
    budgeted = plan.layout.budgeted
    assert [r.recent_tokens for r in budgeted.prefill[0]] == [24, 24]
    for layer, row in zip(found.layers, found.best.choices, strict=True):
        for kept, k in zip(budgeted.decode[layer], row, strict=True):
            code = found.codes[k]
            assert kept.recent_tokens == code.recent_tokens
            assert code.recent_tokens is None or kept.sink_tokens == code.sink_tokens == 2
    provenance = load(output).provenance
    assert provenance is not None
    assert provenance.model == model.fingerprint
    assert provenance.threshold == found.best.tau
    assert provenance.context == 96
    assert DTYPE_BYTES["float32"] == 4


def test_a_plan_of_another_model_is_refused(
    model_folder: Folder, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.ir"
    assert main(words(model_folder("llama"), text, output, "--held-out-samples", "0")) == 0
    assert main(["check", str(output), "--model", str(model_folder("llama"))]) == 0
    assert main(["check", str(output), "--model", str(model_folder("qwen3"))]) == 2
    assert "KV206" in capsys.readouterr().err


def test_sinks_as_a_dimension_become_rules(model_folder: Folder, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.ir"
    more = ("--sinks", "0,1,4", "--objective", "residual", "--budget", ".4", "--retrieval-weight", "2")
    found = calibrated(model_folder("llama"), text, output, *more)
    assert found.best.name == "residual"
    assert found.best.kept_share <= 0.4
    assert {"tau 0.8", "tau 0.95", "residual"} == {point.name for point in found.points}
    budgeted = lower(load(output), load_model(model_folder("llama")), dtype="float32").layout.budgeted
    for retentions, row in zip(budgeted.prefill, found.best.choices, strict=True):
        for kept, k in zip(retentions, row, strict=True):
            assert kept.recent_tokens == found.codes[k].recent_tokens
            assert kept.recent_tokens is None or kept.sink_tokens == found.codes[k].sink_tokens


@pytest.mark.parametrize("weight", [None, 0.0], ids=["all samples", "texts alone"])
def test_full_histories_go_to_the_heads_with_the_greatest_gates(
    model_folder: Folder, text: Path, tmp_path: Path, weight: float | None
) -> None:
    output = tmp_path / "plan.ir"
    more = [
        "--tau",
        ".9",
        "--objective",
        "gates",
        "--budget",
        ".6",
        "--gate-window",
        "16",
        "--gate-steps",
        "4",
    ]
    if weight is not None:
        more += ["--window-weight", "0"]
    found = calibrated(model_folder("gemma3"), text, output, *more)
    assert found.best.name == "gates"
    assert [point.name for point in found.points] == ["tau 0.9", "residual", "gates"]
    assert found.best.kept_share <= 0.6
    assert found.inputs.window_weight == weight
    assert found.gates is not None
    logits = [x for row in found.gates for x in row]
    full = [found.codes[k] == FULL for row in found.best.choices for k in row]
    assert any(full)
    assert min(x for x, is_full in zip(logits, full, strict=True) if is_full) >= max(
        (x for x, is_full in zip(logits, full, strict=True) if not is_full), default=-9e9
    )
    assert "--objective gates --gate-window 16 --gate-steps 4" in output.read_text(encoding="utf-8")


def test_a_budget_holds_at_the_context_where_it_is_counted(
    model_folder: Folder, text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.ir"
    more = ("--objective", "residual", "--budget", ".6", "--budget-context", "48")
    found = calibrated(model_folder("llama"), text, output, *more)
    kept = [found.codes[k].rows(48) for row in found.best.choices for k in row]
    assert found.best.kept_share == sum(kept) / (48 * len(kept)) <= 0.6
    assert "of the rows of a 48-token context" in output.read_text(encoding="utf-8")


def test_kvir_plot_draws_the_grid_again(model_folder: Folder, text: Path, tmp_path: Path) -> None:
    assert main(words(model_folder("llama"), text, tmp_path / "plan.ir")) == 0
    assert main(["plot", str(tmp_path / "plan.json"), "-o", str(tmp_path / "again.png")]) == 0
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "plan.png").read_bytes()
    assert main(["plot", str(tmp_path / "plan.ir")]) == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--budget", ".01"), "no threshold keeps at most 1.0%"),
        (("--objective", "residual"), "give --budget"),
        (("--objective", "gates", "--budget", ".6", "--gate-window", "24"), "not one of --candidates"),
        (("--objective", "gates", "--budget", ".2", "--gate-window", "32"), "give one that keeps less"),
        (("--budget-context", "48"), "goes with --budget"),
        (("--samples", "900"), "give a longer text"),
        (("--candidates", "4096"), "no candidate is shorter"),
        (("--context", "4"), "--context takes one number"),
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


def test_help_needs_no_heavy_library() -> None:
    code = (
        "import sys\nfrom kvir.cli_parser import parser\nparser().format_help()\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    assert run_python(code) == "[]"


def test_a_plan_for_decode_alone_reads_prompts_whole(
    model_folder: Folder, text: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.ir"
    more = ("--objective", "residual", "--budget", ".4", "--phase", "decode")
    found = calibrated(model_folder("gemma3"), text, output, *more)
    budgeted = lower(load(output), load_model(model_folder("gemma3")), dtype="float32").layout.budgeted
    assert [[kept.recent_tokens for kept in row] for row in budgeted.prefill] == [
        [24, 24],
        [None] * 2,
        [None] * 2,
    ]
    decode = [[kept.recent_tokens for kept in row] for row in budgeted.decode[1:]]
    assert decode == [[found.codes[k].recent_tokens for k in row] for row in found.best.choices]


def test_control_c_and_the_same_command_again(model_folder: Folder, text: Path, tmp_path: Path) -> None:
    def command(output: Path) -> list[str]:
        more = ("--samples", "4", "--context", "480", "--query-stride", "1", "--tau", ".5,.7,.8,.9,.95,.99")
        return words(model_folder("llama"), text, output, *more)

    output, unfinished = tmp_path / "plan.ir", tmp_path / ".plan.ir.unfinished"
    run = [sys.executable, "-m", "kvir", *command(output)]
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
    assert unfinished.stat().st_size > 100, "something was found before"
    assert main(command(output)) == 0
    assert not unfinished.exists()
    (tmp_path / "whole").mkdir()
    whole = tmp_path / "whole/plan.ir"
    assert main(command(whole)) == 0
    assert whole.read_text().splitlines()[2:] == output.read_text().splitlines()[2:]
    assert whole.with_suffix(".json").read_bytes() == output.with_suffix(".json").read_bytes()


def test_a_missing_library_is_named_with_the_extra_that_brings_it(tmp_path: Path) -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"  # importing it raises ModuleNotFoundError
        "from kvir.cli import main\nsys.exit(main(['plot', 'grid.json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "kvir: plot needs `torch`: pip install 'kvir[calibrate]'\n"
