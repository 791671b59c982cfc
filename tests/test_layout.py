"""The repository keeps its promises: src/kvir links to the folders, and `kernels/` shadows nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("policy_ir", "lowering", "kernels", "sglang_ext", "calibration", "evals")


@pytest.mark.parametrize("name", FOLDERS)
def test_linked_into_the_package(name: str) -> None:
    link = ROOT / "src/kvir" / name
    assert link.is_symlink()
    assert link.readlink() == Path("../..") / name
    assert link.resolve() == ROOT / name


def test_kernels_tree_has_no_init() -> None:
    found = list((ROOT / "kernels").rglob("__init__.py"))
    assert not found, "would shadow the packages `kernels`, `triton` or `flashinfer` when run from the root"


def test_package_kernels_wins_from_the_root() -> None:
    """SGLang imports a package called `kernels`; a folder of that name must not hide it."""
    pytest.importorskip("kernels", reason="the package `kernels` comes with sglang")
    code = "import kernels; print(kernels.get_kernel.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "get_kernel"


def test_every_data_file_of_the_package_is_declared() -> None:
    """What the wheel must hold beside Python files."""
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for suffix in {p.suffix for p in (ROOT / "kernels").rglob("*.*") if p.is_file()} - {".py", ".pyc", ".so"}:
        assert f'"*{suffix}"' in declared, f"kernels/ holds {suffix} files that package-data does not name"
