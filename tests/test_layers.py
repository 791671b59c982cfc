"""The architecture holds: imports go one way, lower layers are light, files are short, kvir imports fast."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fresh import run_python

ROOT = Path(__file__).parents[1]
LAYERS = ("policy_ir", "kernels", "lowering", "sglang_ext")  # each may import those before it
HEAVY = {"torch", "numpy", "transformers", "sglang", "triton"}
LIGHT_LAYERS = ("policy_ir", "lowering")
MAX_LINES = 300
TOOLS = {  # linked into kvir too; no layer imports them
    "calibration": ("policy_ir", "kernels", "lowering"),
    "evals": ("policy_ir", "kernels", "lowering", "calibration"),
}
OUTSIDE = (
    "evaluation",
    "bench",
    "demo",
    "tools",
    "tests",
)  # may import kvir; kvir never imports them

PARTS = (*LAYERS, *TOOLS)


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, n.name) for n in names)
            case ast.ImportFrom(level=0, module=str(module), names=names):
                yield from ((node.lineno, f"{module}.{n.name}") for n in names)
            case ast.ImportFrom():
                yield node.lineno, "."
            case _:
                pass


@pytest.mark.parametrize("layer", PARTS)
def test_imports_go_one_way(layer: str) -> None:
    allowed = (*TOOLS[layer], layer) if layer in TOOLS else LAYERS[: LAYERS.index(layer) + 1]
    wrong = []
    for path in python_files(layer):
        for line, name in imports(path):
            parts = name.split(".")
            where = f"{path.relative_to(ROOT)}:{line} imports {name}"
            if name == ".":
                wrong.append(f"{where}: write absolute `kvir.` imports")
            elif parts[0] in (*LAYERS, *TOOLS, *OUTSIDE) and parts[0] != "kernels":
                wrong.append(f"{where}: not a part of kvir")
            elif parts[0] == "kvir" and len(parts) > 1 and parts[1] in PARTS and parts[1] not in allowed:
                wrong.append(f"{where} ({layer} may import {', '.join(allowed)})")
    assert not wrong, "\n".join(wrong)


def test_lowering_reads_kernels_as_data_only() -> None:
    used = {
        name
        for path in python_files("lowering")
        for _, name in imports(path)
        if name.startswith("kvir.kernels")
    }
    assert used
    assert all(name.startswith("kvir.kernels.catalog.") for name in used), used


@pytest.mark.parametrize("layer", LIGHT_LAYERS)
def test_language_and_lowering_need_no_heavy_library(layer: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files(layer)
        for line, name in imports(path)
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_loading_a_plan_needs_no_heavy_library() -> None:
    code = (
        "import sys, kvir.cli, kvir.lowering.load, kvir.lowering.footprint\n"
        f"print(sorted(set(sys.modules) & {HEAVY | {'rich'}!r}))"
    )
    assert run_python(code) == "[]"


@pytest.mark.parametrize("folder", [*PARTS, "src", *OUTSIDE])
def test_files_are_short(folder: str) -> None:
    lengths = {p: len(p.read_text(encoding="utf-8").splitlines()) for p in python_files(folder)}
    long = [f"{p.relative_to(ROOT)} has {n} lines" for p, n in lengths.items() if n > MAX_LINES]
    assert not long, "\n".join(long)


def test_importing_kvir_is_cheap() -> None:
    code = "from support.effort import effort; print(effort(lambda: __import__('kvir'))[1])"
    assert min(float(run_python(code)) for _ in range(3)) < 10  # about 0.1 s
