"""The command: exit codes, what goes to which stream, files written whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvir import __version__, cli
from kvir.lowering import plan_file
from support.models import CONFIGS, config_model

LLAMA = str(CONFIGS / "llama-3.1-8b")
TINY = str(CONFIGS / "tiny-llama")
GOOD = "kvir: 1\nname: good\nrules:\n  - keep: [{sink: 4}, {recent: 64}]\n  - {layers: 0, keep: all}\n"
BAD = "kvir: 1\nname: bad\nrules:\n  - keep: [{sink: 4}]\n  - {layers: 3..1, keep: all}\n  - {kep: all}\n"


@pytest.fixture
def good(tmp_path: Path) -> str:
    (tmp_path / "good.ir").write_text(GOOD)
    return str(tmp_path / "good.ir")


@pytest.fixture
def bad(tmp_path: Path) -> str:
    (tmp_path / "bad.ir").write_text(BAD.replace("kep", "keep"))
    return str(tmp_path / "bad.ir")


def test_check_says_ok(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", good]) == 0
    assert cli.main(["check", good, "--model", TINY, "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{good}: ok\n{good}: ok on llama, 4 layers\n"
    assert err == ""


def test_check_names_every_error_of_every_file(
    good: str, bad: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", bad, good, "/nowhere.ir", "--model", TINY]) == 2
    out, err = capsys.readouterr()
    assert out == f"{good}: ok on llama, 4 layers\n"
    assert "KV103" in err
    assert "KV104" in err
    assert f"{bad}:5:" in err
    assert "/nowhere.ir" in err


def test_check_as_json(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", bad, "--json"]) == 2
    out, err = capsys.readouterr()
    records = json.loads(out)
    assert [(r["code"], r["line"]) for r in records] == [("KV103", 4), ("KV104", 5)]
    assert err == ""


def test_check_without_a_device_does_not_ask_for_kernels(
    good: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", good, "--model", str(CONFIGS / "gpt-oss-20b")]) == 0
    assert cli.main(["check", good, "--model", str(CONFIGS / "gpt-oss-20b"), "--device", "cpu"]) == 2
    assert "learned_sinks" in capsys.readouterr().err


def test_lower_writes_a_plan(good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert cli.main(["lower", good, "--model", TINY, "-o", str(out)]) == 0
    plan = plan_file.load(out, model=config_model("tiny-llama"), dtype="float32", device="cpu")
    assert plan.policy.name == "good"
    assert capsys.readouterr().out == ""
    assert cli.main(["lower", good, "--model", TINY]) == 0
    assert capsys.readouterr().out.encode() == out.read_bytes()


def test_lower_writes_nothing_on_errors(bad: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    out.write_text("old")
    assert cli.main(["lower", bad, "--model", TINY, "-o", str(out)]) == 2
    assert out.read_text() == "old"
    assert "KV103" in capsys.readouterr().err


def test_lower_prints_and_stops_where_told(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "lower",
        good,
        "--model",
        TINY,
        "--to",
        "layout",
        "--print-after",
        "resolve",
        "--print-after",
        "budget",
    ]
    assert cli.main(args) == 0
    out, err = capsys.readouterr()
    assert out.startswith("head-page: 16 rows of 8 float32, 1024 bytes\n")
    assert "-- after resolve" in err
    assert "layers 1..3, heads 0..1: sink 4, recent 64" in err


def test_show_says_what_fits(good: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", good, "--model", LLAMA, "--memory", "20GiB", "--lengths", "1k,32k"]) == 0
    from_policy = capsys.readouterr().out
    assert max(map(len, from_policy.splitlines())) <= 80
    # 1 of 32 layers is full: 8 units x 2,048 pages + 248 x (1 + 4 + 1), of 8 KiB; full: 4 GiB
    assert f"{(8 * 2048 + 248 * 6) * 8192 / 2**20:.0f} MiB" in from_policy
    assert "4.00 GiB" in from_policy
    assert "longest context" in from_policy
    plan = str(tmp_path / "plan.json")
    assert cli.main(["lower", good, "--model", LLAMA, "-o", plan]) == 0
    assert cli.main(["show", plan, "--memory", "20GiB", "--lengths", "1k,32k"]) == 0
    assert capsys.readouterr().out == from_policy


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--memory", "lots"], "`lots` is not a size"),
        (["--lengths", "0"], "`0` is not a number of tokens"),
        (["--model", "/nowhere"], "KV200"),
        (["--device", "h201"], "unknown device `h201`; known: cpu, cuda"),
        (["--tp", "3"], "8 KV heads do not divide over 3 ranks"),
    ],
)
def test_show_refuses_nonsense(
    args: list[str], words: str, good: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["show", good, "--model", LLAMA, *args]) == 2
    assert words in capsys.readouterr().err


def test_show_for_a_card_and_ranks(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["show", good, "--model", LLAMA, "--device", "h200", "--tp", "8", "--lengths", "32k"]) == 0
    )
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "Over 8 ranks" in out
    assert "In 131 GiB" in out
    # (8 x 2,048 + 248 x 5 head-pages) of 8 KiB at 4.8 TB/s
    assert f"{(8 * 2048 + 248 * 5) * 8192 / 4.8e12 * 1e3:.3f} ms" in out


def test_show_of_a_policy_needs_a_model(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", good]) == 2
    assert "--model" in capsys.readouterr().err


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "KV203"]) == 0
    assert capsys.readouterr().out.startswith("KV203: no such KV head\n")
    assert cli.main(["explain", "KV999"]) == 2
    assert "no code KV999" in capsys.readouterr().err


def test_print_is_canonical(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["print", good]) == 0
    text = capsys.readouterr().out
    Path(good).write_text(text)
    assert cli.main(["print", good]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize(
    "args",
    [[], ["frobnicate"], ["lower", "x.ir", "--from", "x"], ["lower", "x.ir", "--model", "m", "--to", "x"]],
)
def test_wrong_usage_is_exit_code_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(args)
    assert caught.value.code == 2
    assert "usage: kvir" in capsys.readouterr().err


def test_the_module_runs_as_a_program(good: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvir", "check", good], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{good}: ok\n")
    version = subprocess.run(
        [sys.executable, "-m", "kvir", "--version"], capture_output=True, text=True, check=True
    )
    assert version.stdout == f"kvir {__version__}\n"
    refused = subprocess.run(
        [sys.executable, "-m", "kvir", "check", "/nowhere.ir"], capture_output=True, check=False
    )
    assert refused.returncode == 2
