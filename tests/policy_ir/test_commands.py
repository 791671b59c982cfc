"""`kvir fmt` and `kvir schema`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvir.cli import main
from kvir.policy_ir import PolicyError, load

UNTIDY = "name: x   # mine\nkvir: 1\nrules:\n - keep: [all]\n"
TIDY = "kvir: 1\nname: x  # mine\nrules:\n  - keep: all\n"


def test_fmt_rewrites_files_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.ir"
    path.write_text(UNTIDY)
    assert main(["fmt", "--check", str(path)]) == 2
    assert path.read_text() == UNTIDY
    assert main(["fmt", str(path)]) == 0
    assert path.read_text() == TIDY
    assert main(["fmt", "--check", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: would change\n{path}: formatted\n"
    assert [p.name for p in tmp_path.iterdir()] == ["a.ir"]


def test_fmt_leaves_a_wrong_file_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.ir"
    path.write_text("kvir: 1\nnmae: x\n")
    assert main(["fmt", str(path)]) == 2
    assert path.read_text() == "kvir: 1\nnmae: x\n"
    assert "error[KV020]" in capsys.readouterr().err
    with pytest.raises(PolicyError):
        load(path)


def test_schema_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "kvir policy"
