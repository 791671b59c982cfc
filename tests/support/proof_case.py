"""The proof of selecting kernels at a server's start: right ones pass, wrong ones are named.

Run as `support.triton_cases` is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch

from kvir.kernels.proof import Shapes
from kvir.kernels.proof_selecting import wrong_copies, wrong_sums, wrong_trigger
from support.triton_cases import run


def the_proof_of_a_start_passes() -> float:
    """In several shapes and types; it fails when nothing is chosen, or nothing is copied, or sums are off."""
    from kvir.kernels.triton import compact, sums, trigger

    some = Shapes(6, 2, 64, 16, torch.float32, 0.125)
    every = some, replace(some, dtype=torch.bfloat16), replace(some, logit_cap=20.0, query_heads=2)
    for shapes in every:
        assert wrong_trigger(shapes, "cpu") == []
        assert wrong_sums(sums.SUMS, shapes, "cpu") == []
        assert wrong_copies(compact.COPIES, shapes, "cpu") == []
    nothing = mock.MagicMock()
    for kernel, word in (("choose_rows", "takes"), ("close_gaps", "leaves"), ("window_means", "takes")):
        with mock.patch.object(trigger, kernel, nothing):
            assert any(word in found for found in wrong_trigger(some, "cpu")), kernel
    with mock.patch.object(sums, "column_sums", nothing):
        assert any(found.startswith("sums") for found in wrong_sums(sums.SUMS, some, "cpu"))
    with mock.patch.object(sums, "lse_merge", nothing):
        assert any(found.startswith("log-sum-exp") for found in wrong_sums(sums.SUMS, some, "cpu"))
    with mock.patch.object(compact, "gather_rows", nothing):
        assert wrong_copies(compact.COPIES, some, "cpu") == ["copies of the rows that stay differ"]
    return 0.0


CASES: dict[str, Callable[[], float]] = {"the-proof-of-a-start-passes": the_proof_of_a_start_passes}

if __name__ == "__main__":
    json.dump(run(CASES), sys.stdout)
