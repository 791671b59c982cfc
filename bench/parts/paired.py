"""Intervals of 95 %: of shares, and of what part of a gap is closed."""

from __future__ import annotations

import random
from collections.abc import Sequence

RESAMPLES = 2000
Z = 1.96


def share(found: Sequence[bool]) -> str:
    """A share with Wilson's interval."""
    n, p = len(found), sum(found) / len(found)
    middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * (p * (1 - p) / n + Z * Z / (4 * n * n)) ** 0.5
    return f"{p:.2f} [{max(0, middle - half):.2f}, {min(1, middle + half):.2f}]"


def recovered(
    best: Sequence[float], plan: Sequence[float], full: Sequence[float]
) -> tuple[float, float, float]:
    """How much of the gap from `best` to `full` a plan closes, prompt by prompt, over resampled prompts."""

    def part(rows: Sequence[int]) -> float:
        gap = sum(best[i] - full[i] for i in rows)
        return sum(best[i] - plan[i] for i in rows) / gap if gap > 0 else float("nan")

    rng, every = random.Random(0), range(len(full))
    found = sorted(part([rng.randrange(len(full)) for _ in every]) for _ in range(RESAMPLES))
    return part(every), found[int(0.025 * RESAMPLES)], found[int(0.975 * RESAMPLES)]
