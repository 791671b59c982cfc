"""Budgets with a fixed total: convex hulls, and the exact share-out against every combination."""

from __future__ import annotations

import itertools
import random

import pytest

from kvir.calibration.polykv.allocate import Curve, allocate, error_at, hull


def every(curves: list[Curve], total: int) -> float | None:
    """The least sum of convexified errors over all integer rows that cost at most `total`."""
    hulls = [hull(curve) for curve in curves]
    best: float | None = None
    for rows in itertools.product(*(range(one.rows[0], one.rows[-1] + 1) for one in hulls)):
        if sum(n * one.price for n, one in zip(rows, hulls, strict=True)) <= total:
            error = sum(error_at(one, n) for n, one in zip(rows, hulls, strict=True))
            best = error if best is None else min(best, error)
    return best


def curves_of(seed: int, prices: tuple[int, ...] = (1, 1, 1)) -> list[Curve]:
    rng = random.Random(seed)
    rows = (2, 4, 5, 8, 11)
    return [
        Curve(rows, tuple(sorted((rng.random() for _ in rows), reverse=rng.random() < 0.8)), price)
        for price in prices
    ]


@pytest.mark.parametrize("seed", range(25))
def test_the_share_out_is_the_best_there_is(seed: int) -> None:
    curves = curves_of(seed)
    hulls = [hull(curve) for curve in curves]
    for total in (6, 7, 11, 18, 25, 33):
        given = allocate(curves, total)
        assert given is not None
        assert sum(given) <= total
        assert all(2 <= rows <= 11 for rows in given)
        found = sum(error_at(one, rows) for one, rows in zip(hulls, given, strict=True))
        assert found == pytest.approx(every(curves, total))


@pytest.mark.parametrize("seed", range(10))
def test_prices_count(seed: int) -> None:
    """Where rows differ in price, the result misses the best by less than one row."""
    curves = curves_of(seed, (1, 2, 3))
    given = allocate(curves, 37)
    assert given is not None
    assert sum(n * c.price for n, c in zip(given, curves, strict=True)) <= 37
    hulls = [hull(curve) for curve in curves]
    found = sum(error_at(one, rows) for one, rows in zip(hulls, given, strict=True))
    best, more = every(curves, 37), every(curves, 37 - 3)
    assert best is not None
    assert more is not None
    assert best <= found + 1e-12
    assert found <= more + 1e-12


def test_what_falls_by_less_and_less_is_spent_in_full() -> None:
    curves = [Curve((1, 10), (1.0, 0.0)), Curve((1, 10), (2.0, 0.0))]
    assert allocate(curves, 20) == [10, 10]
    assert allocate(curves, 14) == [4, 10]
    assert allocate(curves, 2) == [1, 1]
    assert allocate(curves, 1) is None, "the minimums alone cost more"


def test_a_hull_is_convex_falls_and_lies_below() -> None:
    for seed in range(50):
        (curve, *_) = curves_of(seed)
        low = hull(curve)
        slopes = [
            (b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(zip(low.rows, low.errors, strict=True))
        ]
        assert slopes == sorted(slopes)
        assert all(slope <= 0 for slope in slopes)
        assert all(error_at(low, n) <= e + 1e-12 for n, e in zip(curve.rows, curve.errors, strict=True))
        assert (low.rows[0], low.rows[-1]) == (curve.rows[0], curve.rows[-1])


def test_a_bump_is_bridged() -> None:
    bumpy = Curve((0, 1, 2, 3), (4.0, 3.9, 0.5, 0.6))
    assert hull(bumpy) == Curve((0, 2, 3), (4.0, 0.5, 0.5))
    assert error_at(hull(bumpy), 1) == 2.25
