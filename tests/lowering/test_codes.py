"""Every code that lowering reports is explained, and shown by a golden case."""

from __future__ import annotations

import re
from pathlib import Path

from kvir.policy_ir.codes import codes

ROOT = Path(__file__).parents[2]
CODE = re.compile(r"\"(KV\d{3})\"")


def reported() -> set[str]:
    sources = [*(ROOT / "lowering").glob("*.py"), ROOT / "policy_ir/checks.py"]  # `verify` calls the checks
    return {c for path in sources for c in CODE.findall(path.read_text(encoding="utf-8"))}


def shown() -> set[str]:
    golden = (ROOT / "tests/golden").glob("*.md")
    return {c for path in golden for c in re.findall(r"\[(KV\d{3})\]", path.read_text(encoding="utf-8"))}


def test_every_reported_code_is_explained() -> None:
    assert len(reported()) > 20
    assert reported() <= set(codes())


def test_every_explained_code_is_reported() -> None:
    explained = {c for c in codes() if c[2] != "0"}
    assert explained <= reported()


def test_every_reported_code_has_a_golden_case() -> None:
    # KV109 needs more rules than a page should hold: tests/lowering/test_pipeline.py
    assert reported() - {"KV001", "KV109"} <= shown()
