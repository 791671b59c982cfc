"""Bounds that differ from request to request."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvir.kernels.cpu import ops as cpu
from kvir.kernels.ops import FULL, Bounds
from kvir.kernels.ref.ops import KERNELS as REF
from support.kernel_cases import Shape, decode, error, make


def test_each_request_may_have_bounds_of_its_own() -> None:
    """A compacted request reads sinks and recent rows of its own number."""
    problem = make(Shape(((189, 1), (30, 1), (80, 1)), ((0, FULL),) * 3, 3), chunk_in_cache=True)
    units = problem.bounds.sink.shape[0]
    generator = torch.Generator().manual_seed(7)
    own = Bounds(
        sink=torch.randint(0, 40, (3, units), generator=generator, dtype=torch.int32),
        recent=torch.randint(1, 60, (3, units), generator=generator, dtype=torch.int32),
    )
    together, holes = decode(cpu.KERNELS, replace(problem, bounds=own))
    assert holes == 0
    for b in range(3):
        alone, _ = decode(cpu.KERNELS, replace(problem, bounds=Bounds(own.sink[b], own.recent[b])))
        assert torch.equal(together[b], alone[b])
    wanted, _ = decode(REF, replace(problem, bounds=own))
    assert error(together, wanted) < 2e-6
