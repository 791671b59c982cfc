"""A process of its own for what depends on which modules are loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(code: str) -> str:
    """What `code` prints; it sees the repository, as the tests do."""
    paths = f"{ROOT / 'tests'}:{ROOT / 'src'}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    return done.stdout.strip()
