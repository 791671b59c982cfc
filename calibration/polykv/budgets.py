"""From signals to what each unit is given: a method, and rows."""

from __future__ import annotations

from collections.abc import Sequence

from kvir.calibration.harness import CalibrationError, Harness
from kvir.calibration.polykv.allocate import Curve, allocate
from kvir.calibration.polykv.result import UnitChoice
from kvir.calibration.polykv.signals import LayerSignals, Setting


def share_out(
    harness: Harness,
    setting: Setting,
    measured: Sequence[LayerSignals],
    routed: Sequence[Sequence[int]],
    budget: float,
) -> tuple[tuple[UnitChoice, ...], ...]:
    """Rows for the chosen methods [layer][unit]: the least sum of errors over the residual stream at the
    budget.

    Raises:
        CalibrationError: the minimums alone cost more.
    """
    context = setting.context_tokens
    rows = tuple(round(share * context) for share in setting.shares)
    units = [(i, u) for i, row in enumerate(routed) for u in range(len(row))]
    prices: list[int] = []
    for layer, row in zip(harness.configurable, routed, strict=True):
        prices += [layer.head_dim * (layer.kv_heads if len(row) == 1 else 1)] * len(row)

    def curve(unit: int, method: int) -> Curve:
        index, u = units[unit]
        errors = [at_budget[u] for at_budget in measured[index].residual[method]]
        return Curve(rows, tuple(errors), prices[unit])

    chosen = [method for row in routed for method in row]
    limit = int(budget * context * sum(prices))
    given = allocate([curve(unit, method) for unit, method in enumerate(chosen)], limit)
    if given is None:
        raise CalibrationError(
            f"a budget of {budget:.1%} is less than the minimum of {rows[0]} rows each: raise --budget or "
            "lower --minimum"
        )
    found = iter([UnitChoice(method, rows) for method, rows in zip(chosen, given, strict=True)])
    return tuple(tuple(next(found) for _ in row) for row in routed)
