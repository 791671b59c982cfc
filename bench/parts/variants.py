"""How a server schedules, in a benchmark: name -> (arguments, environment)."""

from __future__ import annotations


def variants(*, retract_every: int) -> dict[str, tuple[tuple[str, ...], dict[str, str]]]:
    """`overlap`; `plain` without that; `retract`, besides, takes requests back every few steps."""
    plain = ("--disable-overlap-schedule",)
    interval = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(retract_every)}
    return {"overlap": ((), {}), "plain": (plain, {}), "retract": (plain, interval)}
