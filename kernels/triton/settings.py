"""Constants of the kernels, and what Triton's interpreter needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)

_knobs: Any = getattr(triton, "knobs")  # noqa: B009  made on demand
INTERPRETED = bool(_knobs.runtime.interpret)  # TRITON_INTERPRET=1 when this is imported
MIN_DOT = 16  # rows that a matrix product takes at least


def kernel(*sizes: str) -> Callable[[Callable[..., Any]], Any]:
    """A function that Triton compiles.

    `sizes` names arguments whose value must not matter to the compiler: it would compile anew whenever one
    becomes 1 or a multiple of 16, as page counts and unit numbers do all the time.
    """
    jit: Any = triton.jit
    return jit(do_not_specialize=list(sizes))


def available() -> str | None:
    """Why Triton kernels cannot run here; None if they can."""
    if INTERPRETED or torch.cuda.is_available():
        return None
    return "no GPU, and Triton's interpreter is off (TRITON_INTERPRET=1 turns it on)"


def widen(tensor: Tensor) -> bool:
    """Whether the interpreter must be kept from computing in the tensor's own type.

    It holds bfloat16 as bits of integers: loads, stores and conversions are right, sums and products are not.
    """
    return INTERPRETED and tensor.dtype is torch.bfloat16


def padded(size: int, least: int = 1) -> int:
    """The next power of 2, which blocks must have."""
    return max(least, triton.next_power_of_2(size))
