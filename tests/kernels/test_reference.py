"""The reference kernels against a dense mask over the whole history, in float64."""

from __future__ import annotations

import pytest
import torch

from kvir.kernels.ops import FULL, Cache
from kvir.kernels.ref.ops import KERNELS as REF
from support.kernel_cases import TOLERANCE, Shape, answer, decode, error, extend, make

MIXED = ((0, FULL), (4, 17), (20, 1))
SHAPES = [
    Shape(((0, 1),), ((0, FULL),), 3),
    Shape(((15, 1), (16, 1), (0, 1), (31, 1)), MIXED, 3),
    Shape(((99, 1), (4, 1)), ((20, 8), (0, 16)), 4, 80, 16),
    Shape(((40, 1),), ((4, 8), (0, 5)), 2, 40, 3),
    Shape(((33, 1),), MIXED, 1, 7, 1, logit_cap=5.0),
    Shape(((50, 1), (64, 1)), MIXED, 2, 64, 16, torch.bfloat16),
    Shape(((50, 1), (64, 1)), MIXED, 2, 64, 16, torch.float16, strided=True),
]
CHUNKS = [
    Shape(((0, 1),), ((0, FULL),), 3),
    Shape(((0, 35), (0, 1), (0, 16)), MIXED, 3),
    Shape(((16, 16), (17, 20), (31, 5), (0, 33)), MIXED, 2, 80),
    Shape(((40, 9),), ((20, 8), (0, 16), (4, 1)), 4, 40, 3),
    Shape(((9, 30),), ((20, 8), (0, 16)), 1, 7, 1, logit_cap=5.0),
    Shape(((50, 3), (64, 40)), MIXED, 2, 64, 16, torch.bfloat16),
    Shape(((50, 3), (64, 40)), MIXED, 2, 64, 16, torch.float16, strided=True),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_equals_the_dense_mask(shape: Shape) -> None:
    problem = make(shape, chunk_in_cache=True)
    out, holes = decode(REF, problem)
    assert holes == 0
    assert error(out, answer(problem)) < TOLERANCE[shape.dtype]


@pytest.mark.parametrize("shape", CHUNKS, ids=str)
def test_extend_equals_the_dense_mask(shape: Shape) -> None:
    problem = make(shape, chunk_in_cache=False)
    out, holes = extend(REF, problem)
    assert holes == 0
    assert error(out, answer(problem)) < TOLERANCE[shape.dtype]


def test_append_writes_rows_that_have_a_head_page_and_drops_the_rest() -> None:
    kv = torch.zeros(4, 2, 2, 3)
    table = torch.tensor([[-1, 3, -1], [-1, 0, 2]], dtype=torch.int32)
    k = torch.arange(1.0, 13.0).view(2, 2, 3)
    # token 0 is row 1 of logical page 0, token 1 is row 0 of logical page 1
    REF.append(k, -k, Cache(kv, table), torch.tensor([1, 2]), 1)
    wanted = torch.zeros(4, 2, 2, 3)
    wanted[3, 0, 1], wanted[3, 1, 1] = k[0, 0], -k[0, 0]
    wanted[0, 0, 0], wanted[0, 1, 0] = k[1, 0], -k[1, 0]
    wanted[2, 0, 0], wanted[2, 1, 0] = k[1, 1], -k[1, 1]
    assert torch.equal(kv, wanted)
