"""What docs/planner.md shows is what the command prints, and its Python runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/planner.md").read_text(encoding="utf-8")
COMMANDS: list[tuple[str, str]] = re.findall(r"```text\n\$ kvir (.*?)\n(.*?)\n```", PAGE, re.DOTALL)


def run(arguments: list[str]) -> str:
    env = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    return "\n".join(line.rstrip() for line in (done.stdout + done.stderr).splitlines()).rstrip()


@pytest.mark.parametrize(("command", "shown"), COMMANDS, ids=[c.split(" --")[0] for c, _ in COMMANDS])
def test_the_page_shows_what_the_command_prints(command: str, shown: str) -> None:
    assert run(["-m", "kvir", *shlex.split(command)]) == shown


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) == 3


def test_the_python_on_the_page_runs() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (claimed,) = re.findall(r"peak_bytes\(plan.layout, 32_768\)\s+# (\d+)", code)
    assert run(["-c", f"{code}\nprint(footprint.peak_bytes(plan.layout, 32_768))"]) == claimed
