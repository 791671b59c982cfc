"""The knapsack against every combination."""

from __future__ import annotations

import itertools
import random

import pytest

from kvir.calibration.residual import MAX_UNITS, allocate


def every(errors: list[list[list[float]]], costs: list[list[int]], limit: int) -> float | None:
    """The least total error at a cost of at most `limit`."""
    heads = [(layer, head) for layer in range(len(errors)) for head in range(len(errors[layer][0]))]
    best: float | None = None
    for picks in itertools.product(range(len(costs[0])), repeat=len(heads)):
        cost = sum(costs[layer][k] for k, (layer, _) in zip(picks, heads, strict=True))
        total = sum(errors[layer][k][head] for k, (layer, head) in zip(picks, heads, strict=True))
        if cost <= limit and (best is None or total < best):
            best = total
    return best


@pytest.mark.parametrize("seed", range(20))
def test_allocation_is_the_best_there_is(seed: int) -> None:
    rng = random.Random(seed)
    costs = [[4, 8, 20], [6, 12, 30]]
    errors = [[[rng.random() * (2 - k) for _ in range(2)] for k in range(3)] for _ in costs]
    for limit in (18, 20, 33, 47, 70, 100):
        found = allocate(tuple(tuple(tuple(row) for row in layer) for layer in errors), costs, limit)
        best = every(errors, costs, limit)
        if best is None:
            assert found is None
            continue
        assert found is not None
        assert sum(costs[layer][k] for layer, row in enumerate(found) for k in row) <= limit
        total = sum(errors[layer][k][head] for layer, row in enumerate(found) for head, k in enumerate(row))
        assert total == pytest.approx(best)


def test_a_limit_finer_than_the_table_still_holds() -> None:
    costs = [[MAX_UNITS * 3 + 1, MAX_UNITS * 7 + 3]]
    errors = (((1.0, 2.0, 0.5), (0.0, 0.0, 0.0)),)
    limit = 2 * costs[0][0] + costs[0][1]
    found = allocate(errors, costs, limit + 10 * MAX_UNITS // 1000)
    assert found is not None
    assert sum(costs[0][k] for k in found[0]) <= limit + 10 * MAX_UNITS // 1000
