"""Biases of rows: added to logits in decode, zero where a row is new."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvir.kernels.cpu import ops as cpu
from kvir.kernels.ops import FULL, Cache, Kernels
from kvir.kernels.ref.attend import attention
from kvir.kernels.ref.ops import KERNELS as REF
from support.kernel_cases import Problem, Shape, close, decode, make, ones

CASES = [
    *(Shape(ones(n), ((0, FULL), (4, 17), (20, 100)), 3, seed=n) for n in (1, 16, 33, 257, 700)),
    *(Shape(ones(300, 31), ((0, FULL), (3, 90)), g, d) for g, d in ((1, 128), (8, 64), (5, 40))),
    *(Shape(ones(300, 31), ((0, FULL),), 3, dtype=t) for t in (torch.bfloat16, torch.float16)),
    Shape(ones(300, 31), ((0, FULL),), 4, logit_cap=30.0, page_rows=8),
]


def biased(problem: Problem) -> Problem:
    pages, _, rows, _ = problem.cache.kv.shape
    bias = torch.randn(pages, rows, generator=torch.Generator().manual_seed(5)) * 3
    return replace(problem, cache=replace(problem.cache, bias=bias))


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_decode_with_biases_equals_the_reference(shape: Shape, isa: str) -> None:
    problem = biased(make(shape, chunk_in_cache=True))
    wanted, _ = decode(REF, problem)
    got, holes = decode(cpu.KERNELS, problem)
    assert holes == 0
    assert close(got, wanted)
    plain, _ = decode(REF, replace(problem, cache=replace(problem.cache, bias=None)))
    assert shape.requests == ((0, 1),) or not close(plain, wanted)


def test_a_bias_is_as_many_equal_rows() -> None:
    """A row with a bias of log n counts as n of them."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 3, 16), torch.randn(5, 16), torch.randn(5, 16)
    bias = torch.tensor([0, 0, 7, 0, 0]).clamp_min(1).log()
    rows = torch.tensor([0, 1, *[2] * 7, 3, 4])
    seen = torch.ones(1, 5, dtype=torch.bool)
    found = attention(q, k, v, seen, 0.25, 0.0, bias)
    wanted = attention(q, k[rows], v[rows], torch.ones(1, 11, dtype=torch.bool), 0.25, 0.0)
    assert (found - wanted).abs().max() < 1e-6


@pytest.mark.parametrize("kernels", [REF, cpu.KERNELS], ids=lambda kernels: kernels.name)
def test_new_rows_have_no_bias(kernels: Kernels) -> None:
    kv, table = torch.zeros(6, 2, 4, 8), torch.arange(6, dtype=torch.int32).view(3, 2)
    cache = Cache(kv, table, bias=torch.ones(6, 4))
    rows = torch.ones(2, 2, 8)
    kernels.append(rows, rows, cache, torch.tensor([3, 5]), 0)
    assert cache.bias is not None
    written = kv[:, 0, :, 0] == 1
    assert written.sum() == 4
    assert torch.equal(cache.bias == 0, written)
