"""Prefill by FlashInfer's interface, on a stand-in of its package, against the reference."""

from __future__ import annotations

import random

import pytest
import torch

from kvir.kernels import dispatch
from kvir.kernels.flashinfer.prefill import Prefill
from kvir.kernels.ops import FULL, Bounds, Cache
from support import flashinfer_standin as standin

REF = dispatch.get("ref")
PAGE, LAYERS = 16, 3


class Batch:
    """Layers of a forward: requests with a prefix in head-pages in random order, and fresh rows."""

    def __init__(self, prefixes: list[int], extends: list[int], heads: int, group: int, dim: int) -> None:
        self.heads, counts = heads, [-(-n // PAGE) for n in prefixes]
        logical = torch.randperm(sum(counts)) + 1
        self.pages = torch.full((len(prefixes), max(1, *counts)), -1, dtype=torch.int32)
        for b, ids in enumerate(logical.split(counts)):
            self.pages[b, : len(ids)] = ids.to(torch.int32)
        units = LAYERS * heads
        self.table = torch.full((sum(counts) + 1, units), -1, dtype=torch.int32)
        self.table[1:] = torch.randperm(sum(counts) * units).view(-1, units).to(torch.int32)
        self.kv = torch.randn(sum(counts) * units + 1, 2, PAGE, dim)
        self.q = torch.randn(sum(extends), heads * group, dim)
        self.k, self.v = torch.randn(2, sum(extends), heads, dim)
        self.prefix_lens = torch.tensor(prefixes, dtype=torch.int32)
        self.extend_lens = torch.tensor(extends, dtype=torch.int32)
        zeros = torch.zeros(units, dtype=torch.int32)
        self.bounds = Bounds(zeros, torch.full_like(zeros, FULL))

    def error(self, prefill: Prefill, layer: int, cap: float = 0.0) -> tuple[float, int, int]:
        """Of one layer: the largest difference, and the holes of either."""
        unit0, scale = layer * self.heads, self.q.shape[2] ** -0.5
        before = self.q, self.k, self.v, Cache(self.kv, self.table), self.pages
        lens = self.prefix_lens, self.extend_lens
        out, wanted, holes = (
            torch.empty_like(self.q),
            torch.empty_like(self.q),
            torch.zeros(1, dtype=torch.int32),
        )
        prefill(*before, *lens, self.bounds, unit0, scale, cap, out, holes)
        missing = REF.attend_extend(*before, *lens, self.bounds, unit0, scale, cap, wanted)
        return float((out - wanted).abs().max()), int(holes), missing


@pytest.mark.parametrize("cap", [0.0, 20.0])
@pytest.mark.parametrize(("heads", "group", "dim"), [(2, 3, 64), (1, 8, 64), (3, 1, 128)])
def test_layers_of_a_batch(heads: int, group: int, dim: int, cap: float) -> None:
    """Requests without a prefix, with a page of it, with a row more, and with a part of one."""
    torch.manual_seed(0)
    prefill = Prefill("cpu", standin)
    for prefixes, extends in (
        ([0, 16, 33, 5], [20, 1, 7, 40]),
        ([0, 0], [3, 30]),
        ([48, 1], [2, 2]),
        ([100], [64]),
    ):
        batch = Batch(prefixes, extends, heads, group, dim)
        for layer in range(LAYERS):
            error, holes, missing = batch.error(prefill, layer, cap)
            assert error < 1e-5
            assert holes == missing == 0


def test_one_plan_serves_the_layers_of_a_forward() -> None:
    prefill = Prefill("cpu", standin)
    kinds = standin.BatchPrefillWithRaggedKVCacheWrapper, standin.BatchPrefillWithPagedKVCacheWrapper
    before = [kind.plans for kind in kinds]
    batch = Batch([20, 0], [5, 6], 2, 3, 64)
    for layer in range(LAYERS):
        assert batch.error(prefill, layer)[0] < 1e-5
    assert [kind.plans - n for kind, n in zip(kinds, before, strict=True)] == [1, 1]
    again = Batch([20, 0], [5, 6], 2, 3, 64)  # other pages at the same lengths
    assert again.error(prefill, 1)[0] < 1e-5
    assert [kind.plans - n for kind, n in zip(kinds, before, strict=True)] == [2, 2]


def test_missing_rows_are_counted() -> None:
    prefill, batch = Prefill("cpu", standin), Batch([40, 33], [5, 6], 2, 3, 64)
    batch.table[batch.pages[0, 1], 0] = -1  # a whole page of one head
    batch.table[batch.pages[1, 2], 1] = -1  # a page with one row
    _, holes, missing = batch.error(prefill, 0)
    assert holes == missing == 17


def test_random_batches() -> None:
    chance = random.Random(3)
    prefill = Prefill("cpu", standin)
    for _ in range(30):
        size = chance.randint(1, 5)
        prefixes = [chance.choice([0, 1, 15, 16, 17, chance.randint(0, 90)]) for _ in range(size)]
        batch = Batch(prefixes, [chance.randint(1, 40) for _ in range(size)], chance.choice([1, 2, 4]), 2, 64)
        assert batch.error(prefill, chance.randrange(LAYERS))[0] < 1e-5
