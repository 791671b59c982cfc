"""Budgets of units with a fixed total: error curves made convex, then shared out exactly.

A unit's curve says its error at some budgets.  Below its convex hull lies nothing that could be reached by
mixing budgets, so the hull stands for the curve; along the hull, each further row helps less than the one
before.  Then the best way to spend a total is to buy, again and again, the piece that helps most for its
price: no exchange of rows between units can lower the sum of the errors.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Error of one unit at ascending budgets of rows; `price` is the cost of one row."""

    rows: tuple[int, ...]
    errors: tuple[float, ...]
    price: int = 1


def hull(curve: Curve) -> Curve:
    """The lower convex hull, falling: more rows never count as worse."""
    points: list[tuple[int, float]] = []
    least = float("inf")
    for row, error in zip(curve.rows, curve.errors, strict=True):
        least = min(least, error)  # rows may be left unused
        point = (row, least)
        while len(points) > 1 and _slope(points[-2], point) <= _slope(points[-2], points[-1]):
            points.pop()
        points.append(point)
    rows, errors = zip(*points, strict=True)
    return Curve(rows, errors, curve.price)


def error_at(curve: Curve, rows: int) -> float:
    """The error between measured budgets, on a straight line."""
    if rows <= curve.rows[0]:
        return curve.errors[0]
    for (a, left), (b, right) in zip(_points(curve), _points(curve)[1:], strict=False):
        if rows <= b:
            return left + (right - left) * (rows - a) / (b - a)
    return curve.errors[-1]


def allocate(curves: Sequence[Curve], total: int) -> list[int] | None:
    """Rows of each unit: the least sum of convexified errors at a cost of at most `total`.

    Each unit gets at least the first budget of its curve and at most the last; None if the minimums alone
    cost more than the total.  Exact where all rows cost the same; else up to the price of one row.  Of
    equal pieces that of the first unit is bought first.
    """
    hulls = [hull(curve) for curve in curves]
    given = [one.rows[0] for one in hulls]
    left = total - sum(rows * one.price for rows, one in zip(given, hulls, strict=True))
    if left < 0:
        return None
    pieces = [_piece(one, unit, 0) for unit, one in enumerate(hulls) if len(one.rows) > 1]
    heapq.heapify(pieces)
    while pieces and left > 0:
        _, unit, index = heapq.heappop(pieces)
        one = hulls[unit]
        wanted = one.rows[index + 1] - one.rows[index]
        bought = min(wanted, left // one.price)
        given[unit] += bought
        left -= bought * one.price
        if bought == wanted and index + 2 < len(one.rows):
            heapq.heappush(pieces, _piece(one, unit, index + 1))
    return given


def _piece(one: Curve, unit: int, index: int) -> tuple[float, int, int]:
    """(change of the error per cost, unit, index of the piece); the least is bought first."""
    points = _points(one)
    return _slope(points[index], points[index + 1]) / one.price, unit, index


def _points(curve: Curve) -> list[tuple[int, float]]:
    return list(zip(curve.rows, curve.errors, strict=True))


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
