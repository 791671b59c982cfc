"""Work, at the pace that the machine has at that moment: a load on it decides no test."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

WORDS = [f"w{i}" for i in range(1000)]


def effort(action: Callable[[], T], *, rounds: int = 1) -> tuple[T, float]:
    """What `action` returns, and its processor time: 1 is about 10 ms of plain Python where all is quiet.

    The least of `rounds`.  Objects made before are kept from the garbage collector meanwhile: how many a run
    of all tests has left behind is no property of the action.
    """
    gc.collect()
    gc.freeze()
    try:
        measured = [_once(action) for _ in range(rounds)]
    finally:
        gc.unfreeze()
    return measured[-1][0], min(units for _, units in measured)


def _once(action: Callable[[], T]) -> tuple[T, float]:
    pace_s = _seconds(_yardstick)[1]
    result, seconds = _seconds(action)
    return result, seconds / max(pace_s, _seconds(_yardstick)[1])


def _seconds(action: Callable[[], T]) -> tuple[T, float]:
    begin = time.process_time()
    result = action()
    return result, time.process_time() - begin


def _yardstick() -> int:
    """Dictionaries, small objects and strings, as reading and lowering use them."""
    return sum(len({word: [i, word + "."] for word in WORDS}) for i in range(45))
