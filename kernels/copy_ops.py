"""The contract of what happens to rows that stay: they are copied, and rows that go are merged into them.

The legend is that of `kernels/ops.py` and `kernels/score_ops.py`.  Implementations: `kernels/ref`; of copies
also `kernels/triton`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvir.policy_ir.rules import Merge

if TYPE_CHECKING:
    from torch import Tensor


class Compact(Protocol):
    """Copy kept rows of one unit into head-pages, in the order of their positions.

    Row i of `rows` goes to `pages[i // P]` at offset i % P; later places are not written.  Returns their
    number.  Raises ValueError if the pages are too few or rows do not ascend.
    """

    def __call__(
        self,
        k: Tensor,  # [n, D]
        v: Tensor,  # [n, D]
        rows: Tensor,  # int64 [m], ascending
        kv: Tensor,  # [N, 2, P, D], written
        pages: Tensor,  # int [>= ceil(m / P)], head-pages
    ) -> int: ...


class CompactUnits(Protocol):
    """`Compact` for units that hold the same rows, all of them in one call.  Checks nothing."""

    def __call__(
        self,
        k: Tensor,  # [n, units, D]
        v: Tensor,
        rows: Sequence[Tensor],
        kv: Tensor,
        pages: Sequence[Tensor],  # on the host
    ) -> None: ...


@dataclass(frozen=True)
class CopyKernels:
    """An implementation of the copies that a selection makes."""

    name: str
    compact_units: CompactUnits


class MergeRows(Protocol):
    """Fold the rows of one unit that go into rows that stay: k, v [m, D] and bias float32 [m] of those.

    What one KV head holds is k, v [n, D] with biases and positions; `stay` are the rows that stay, ascending,
    `into` those among them that may be changed (a part of `stay`, ascending); all others go.  `q` are the
    reference queries [R, G, D] at `q_positions` [R].  See `Merge` of the
    language.  If `into` is empty, nothing is changed.
    """

    def __call__(
        self,
        spec: Merge,
        k: Tensor,
        v: Tensor,
        bias: Tensor,
        positions: Tensor,
        stay: Tensor,
        into: Tensor,
        q: Tensor,
        q_positions: Tensor,
        scale: float,
        logit_cap: float,
    ) -> tuple[Tensor, Tensor, Tensor]: ...
