"""Ties that rounding decides: is a served answer what the oracle would have said with other last bits?

Two engines differ in the last bits of queries and keys.  Among ten thousands of selections of a long request,
some row beats another by no more than that; then the engines keep different rows, both rightly, and
log-probabilities differ by more than rounding alone explains.  So a request that is off is asked of the
oracle again, with scores that read slightly wrong queries, keys and values: if some such oracle agrees with
what was served, the difference is a tie.  A row that is wrong for another reason agrees with none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from evaluation.oracle import compare
from evaluation.server import Served

if TYPE_CHECKING:
    from evaluation.selection_oracle import SelectionOracle

RELATIVE = 1e-6  # float32 has 6e-8; some layers add up
TRIES = 12


class Rounding:
    """A source of relative errors."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._generator = torch.Generator().manual_seed(seed)

    def off(self, x: Tensor) -> Tensor:
        return x * (1 + RELATIVE * torch.randn(x.shape, generator=self._generator, dtype=x.dtype))


@dataclass(frozen=True)
class Ties:
    """How many requests are off, and how many of them are explained."""

    requests: int
    off: int
    explained: int

    def __str__(self) -> str:
        return f"{self.explained} of {self.off} (of {self.requests} requests)"


def ties(oracle: SelectionOracle, served: Sequence[Served]) -> Ties:
    """Ask about every request; again, with other last bits, about those that are off."""
    off = explained = 0
    for one in served:
        if _agrees(oracle, one):
            continue
        off += 1
        explained += any(_agrees(oracle, one, Rounding(seed)) for seed in range(TRIES))
    return Ties(len(served), off, explained)


def _agrees(oracle: SelectionOracle, served: Served, rounding: Rounding | None = None) -> bool:
    oracle.rounding = rounding
    try:
        return compare([served], [oracle.force(served.prompt_ids, served.output_ids)]).ok
    finally:
        oracle.rounding = None
