"""The proof of kernels at the start of a server: right kernels pass, wrong ones are named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvir.kernels import dispatch
from kvir.kernels.ops import FULL, Bounds
from kvir.kernels.proof import Shapes, disagreements

SHAPES = Shapes(query_heads=6, kv_heads=2, head_dim=64, page_rows=16, dtype=torch.float32, scale=0.125)
CPU = dispatch.get("cpu")


@pytest.mark.parametrize("name", ["ref", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("more", [{}, {"logit_cap": 20.0}, {"biased": True}, {"kv_heads": 1}])
def test_right_kernels_pass(name: str, dtype: torch.dtype, more: dict[str, Any]) -> None:
    assert disagreements(dispatch.get(name), replace(SHAPES, dtype=dtype, **more), "cpu") == []


def wrong_append(k: Any, v: Any, *rest: Any) -> None:
    CPU.append(v, k, *rest)


def one_row_less(q: Any, cache: Any, pages: Any, lens: Any, *rest: Any) -> int:
    return CPU.attend_decode(q, cache, pages, (lens - 1).clamp(min=1), *rest)


def counts_nothing(*arguments: Any) -> int:
    CPU.attend_extend(*arguments)
    return 0


def sees_everything(q: Any, cache: Any, pages: Any, lens: Any, bounds: Any, *rest: Any) -> int:
    every = Bounds(bounds.sink, torch.full_like(bounds.recent, FULL))
    return CPU.attend_decode(q, cache, pages, lens, every, *rest)


def writes_nothing(*_arguments: Any) -> int:
    return 0


WRONG = {
    "append wrote other rows": replace(CPU, append=wrong_append),
    "decode differs by": replace(CPU, attend_decode=one_row_less),
    "decode differs by nan": replace(CPU, attend_decode=writes_nothing),
    "decode misses": replace(CPU, attend_decode=sees_everything),
    "extend misses 0 rows, not": replace(CPU, attend_extend=counts_nothing),
}


@pytest.mark.parametrize("found", WRONG)
def test_wrong_kernels_are_named(found: str) -> None:
    assert any(each.startswith(found) for each in disagreements(WRONG[found], SHAPES, "cpu"))
