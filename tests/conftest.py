"""Collects golden Markdown cases; `--update-golden` rewrites their expected blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import mdcase, passes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite expected blocks in tests/golden")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.suffix == ".md" and file_path.parent.name == "golden":
        return GoldenFile.from_parent(parent, path=file_path)
    return None


class GoldenFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        for case in mdcase.cases(self.path.read_text(encoding="utf-8")):
            yield GoldenItem.from_parent(self, name=case.title)


class GoldenItem(pytest.Item):
    def runtest(self) -> None:
        update = bool(self.config.getoption("--update-golden"))
        mdcase.check(self.path, self.name, passes.run, update=update)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        if excinfo.errisinstance(AssertionError):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))
