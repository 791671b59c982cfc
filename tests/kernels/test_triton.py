"""The Triton kernels against the reference, in Triton's interpreter.

The interpreter is chosen when Triton is imported, so cases run in processes of their own, once for all tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from kvir.kernels import dispatch
from support import graph_case, proof_case, trigger_case, triton_cases, triton_score_cases

ROOT = Path(__file__).parents[2]
MODULES = {
    "support.triton_cases": triton_cases.CASES,
    "support.triton_score_cases": triton_score_cases.CASES,
    "support.graph_case": graph_case.CASES,
    "support.trigger_case": trigger_case.CASES,
    "support.proof_case": proof_case.CASES,
}
ALL = [(module, name) for module, cases in MODULES.items() for name in cases]


@cache
def outcomes(module: str) -> dict[str, float | str]:
    """What a module printed: the error of each of its cases over what is allowed, or a traceback."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)]),
    }
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", module]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(("module", "name"), ALL, ids=[name for _, name in ALL])
def test_equals_the_reference(module: str, name: str) -> None:
    outcome = outcomes(module)[name]
    assert isinstance(outcome, float), outcome
    assert outcome < 1


def test_there_are_enough_cases() -> None:
    assert len(ALL) >= 200


def test_without_a_gpu_the_reason_is_given() -> None:
    assert dispatch.unavailable("triton") == (
        "no GPU, and Triton's interpreter is off (TRITON_INTERPRET=1 turns it on)"
    )
