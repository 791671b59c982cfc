"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvir.kernels.cpu import ops as cpu


# Without a compiler these tests fail; they are not skipped.
@pytest.fixture(params=cpu.isas() if cpu.available() is None else ["not compiled"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn."""
    assert cpu.available() is None, cpu.available()
    before = cpu.use_isa(request.param)
    yield request.param
    cpu.use_isa(before)
