"""The compiled kernels against the reference, on every instruction set of this machine."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvir.kernels.cpu import ops as cpu
from kvir.kernels.ops import FULL, Cache
from kvir.kernels.ref.ops import KERNELS as REF
from support.kernel_cases import Problem, Shape, close, decode, extend, make, ones

FLOAT, BF16, HALF = torch.float32, torch.bfloat16, torch.float16
# Windows of 1, 8, 16 and 17 rows, sinks of 0, 4 and 20.
FULL_ONLY = ((0, FULL),)
SHORT = ((0, 1), (4, 8), (20, 16))
MIXED = ((0, FULL), (4, 17), (20, 100))


DECODE = [
    # page edges
    *(Shape(ones(n), MIXED, 3, seed=n) for n in (1, 2, 15, 16, 17, 31, 32, 33)),
    # groups and head sizes, odd ones too
    *(Shape(ones(40, 7, 290), SHORT, g, d) for g in (1, 3, 4, 8) for d in (64, 80, 128, 256)),
    *(Shape(ones(70, 1), MIXED, g, d) for g, d in ((2, 96), (5, 72), (7, 8), (16, 40), (3, 24), (6, 56))),
    # other page sizes
    *(Shape(ones(100, 33), MIXED, 3, 64, p) for p in (1, 3, 4, 8, 64, 1000)),
    # more than one chunk; one huge head among tiny ones
    *(Shape(ones(n), ((0, FULL), (0, 8), (4, 1)), 3, seed=n) for n in (255, 256, 257, 384, 385, 1500)),
    Shape(ones(700, 3, 255, 16), ((20, 300), (0, FULL), (4, 513)), 4, 128),
    # the rest
    *(Shape(ones(300, 31), MIXED, g, d, logit_cap=30.0) for g, d in ((3, 64), (4, 72))),
    *(Shape(ones(300, 31), MIXED, g, d, strided=True) for g, d in ((3, 64), (1, 128))),
    *(Shape(ones(300, 17, 1), MIXED, g, d, dtype=t, seed=d) for t in (BF16, HALF)
      for g, d in ((3, 64), (4, 128), (1, 80), (8, 96), (2, 256), (3, 72), (5, 40))),
    Shape(ones(300, 31), MIXED, 3, dtype=BF16, logit_cap=30.0, strided=True),
]  # fmt: skip

EXTEND = [
    # no prefix; at page edges; in the middle of a page
    *(Shape(((0, n),), MIXED, 3, seed=n) for n in (1, 15, 16, 17, 64, 65, 130)),
    *(Shape(((p, n),), MIXED, 3, seed=n) for p in (16, 32, 256) for n in (1, 16, 33)),
    *(Shape(((p, n),), MIXED, 3, seed=n) for p in (1, 15, 17, 100, 333) for n in (1, 31, 70)),
    # groups and head sizes, odd ones too
    *(Shape(((20, 40), (0, 7), (3, 90)), SHORT, g, d) for g in (1, 3, 4, 8) for d in (64, 80, 128, 256)),
    *(Shape(((70, 9), (0, 65)), MIXED, g, d) for g, d in ((2, 96), (5, 72), (7, 8), (16, 40), (3, 24))),
    # other page sizes
    *(Shape(((50, 20), (33, 70)), MIXED, 3, 64, p) for p in (1, 3, 4, 8, 64, 1000)),
    # windows shorter than the chunk, longer, and of the prefix only; several blocks of lanes
    *(Shape(((300, 300),), ((0, w), (4, w), (20, w)), 3) for w in (1, 8, 16, 17, 64, 299, 500)),
    Shape(((700, 150), (0, 3), (90, 200), (5, 1)), ((20, 300), (0, FULL), (4, 513)), 1),
    # short chunks after long prefixes, whose keys are cut into segments
    *(Shape(((2300, n),), ((0, FULL), (4, 17), (9, 1500)), g) for g, n in ((1, 1), (3, 20), (4, 96))),
    Shape(((2300, 20), (1100, 3)), ((0, FULL), (1200, 1200)), 4, 128, dtype=BF16),
    # the rest
    *(Shape(((100, 90), (0, 31)), MIXED, g, d, logit_cap=30.0) for g, d in ((3, 64), (4, 72))),
    *(Shape(((100, 90), (0, 31)), MIXED, g, d, strided=True) for g, d in ((3, 64), (1, 128))),
    *(Shape(((100, 90), (0, 17), (31, 1)), MIXED, g, d, dtype=t, seed=d) for t in (BF16, HALF)
      for g, d in ((3, 64), (4, 128), (1, 80), (8, 96), (2, 256), (3, 72), (5, 40))),
    Shape(((100, 90), (0, 31)), MIXED, 3, dtype=BF16, logit_cap=30.0, strided=True),
]  # fmt: skip


@pytest.mark.parametrize("shape", DECODE, ids=str)
def test_decode_equals_the_reference(shape: Shape, isa: str) -> None:
    problem, wanted = decode_problem(shape)
    got, holes = decode(cpu.KERNELS, problem)
    assert holes == 0
    assert close(got, wanted)


@pytest.mark.parametrize("shape", EXTEND, ids=str)
def test_extend_equals_the_reference(shape: Shape, isa: str) -> None:
    problem, wanted = extend_problem(shape)
    got, holes = extend(cpu.KERNELS, problem)
    assert holes == 0
    assert close(got, wanted)


@cache
def decode_problem(shape: Shape) -> tuple[Problem, torch.Tensor]:
    """A problem and the reference's answer, made once for all instruction sets."""
    problem = make(shape, chunk_in_cache=True)
    return problem, decode(REF, problem)[0]


@cache
def extend_problem(shape: Shape) -> tuple[Problem, torch.Tensor]:
    problem = make(shape, chunk_in_cache=False)
    return problem, extend(REF, problem)[0]


@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
def test_large_logits_do_not_overflow(dtype: torch.dtype, isa: str) -> None:
    # logits of some hundreds, rising along the sequence, so that the reference logit has to move
    problem = make(Shape(ones(600), FULL_ONLY, 3, dtype=dtype), chunk_in_cache=True)
    problem.cache.kv[:, 0] *= torch.linspace(1, 60, problem.cache.kv.shape[0]).to(dtype)[:, None, None]
    wanted, _ = decode(REF, problem)
    got, _ = decode(cpu.KERNELS, problem)
    assert close(got / 20, wanted / 20)
    chunk = make(Shape(((100, 200),), FULL_ONLY, 3, dtype=dtype), chunk_in_cache=False)
    chunk.k_new.mul_(torch.linspace(1, 60, 200).to(dtype)[:, None, None])
    wanted, _ = extend(REF, chunk)
    got, _ = extend(cpu.KERNELS, chunk)
    assert close(got / 20, wanted / 20)


@pytest.mark.parametrize("dtype", [FLOAT, BF16, HALF], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_append_equals_the_reference(dtype: torch.dtype, strided: bool) -> None:
    torch.manual_seed(0)
    tokens, heads, head_dim, page_rows = 200, 3, 40, 16
    width = heads * head_dim
    fused = torch.randn(tokens, 2 * width + 8).to(dtype)
    k, v = (fused[:, i * width : (i + 1) * width].unflatten(1, (heads, head_dim)) for i in (0, 1))
    if not strided:
        k, v = k.contiguous(), v.contiguous()
    table = torch.randperm(20 * 9).to(torch.int32).view(20, 9)
    table[torch.rand(table.shape) < 0.4] = -1
    table[3, 4] = 180  # past the pool
    slots = torch.randperm(20 * page_rows)[:tokens].clone()
    slots[:3] = torch.tensor([-1, 20 * page_rows, 10**12])
    pools = [torch.zeros(180, 2, page_rows, head_dim, dtype=dtype) for _ in range(2)]
    REF.append(k, v, Cache(pools[0], table), slots, 3)
    cpu.KERNELS.append(k, v, Cache(pools[1], table), slots, 3)
    assert torch.equal(pools[0], pools[1])
    assert pools[0].count_nonzero() > 0
