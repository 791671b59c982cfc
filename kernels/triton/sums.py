"""What scores sum over queries: `Running` of `kernels/score_ops.py`, and the weights of a window."""

from __future__ import annotations

from functools import partial
from math import log2
from typing import Literal

import torch
import triton
from torch import Tensor

from kvir.kernels.ref.score_running import running_of
from kvir.kernels.score_ops import SumKernels, Sums
from kvir.kernels.triton.columns import COUNT, LARGEST, SQUARES, SUM, column_sums, lse_merge, lse_parts
from kvir.kernels.triton.settings import padded, widen
from kvir.policy_ir.scores import Accumulated, Persistent

QUERIES = 64
ROWS = 64
PART_ROWS = 2048  # rows that one program takes the log-sum-exp of
MERGED = 256

How = Literal["sum", "squares", "largest", "count"]
CODES = {"sum": SUM, "squares": SQUARES, "largest": LARGEST, "count": COUNT}


def log_sum_exp(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    scale: float,
    *,
    logit_cap: float = 0.0,
    k_positions: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """q [T, Hq, D], k [n, Hkv, D], positions int64 [T] and [n] -> float32 [T, Hq], natural.

    `k_positions` None: rows 0 .. n - 1.  A query that sees no row has -inf.
    """
    tokens, query_heads, head_dim = q.shape
    rows, kv_heads = k.shape[:2]
    group = query_heads // kv_heads
    positions = _positions(k, k_positions)
    parts = max(1, triton.cdiv(rows, PART_ROWS))
    part_max = torch.empty((parts, tokens, query_heads), dtype=torch.float32, device=q.device)
    part_sum = torch.empty_like(part_max)
    lse_parts[(kv_heads, triton.cdiv(tokens * group, QUERIES), parts)](
        q, k, q_positions, positions, part_max, part_sum, tokens, rows, PART_ROWS,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), scale, logit_cap,
        G=group, QUERIES=QUERIES, D=head_dim, DIM=padded(head_dim, 16), ROWS=ROWS, CAP=logit_cap > 0,
        CAUSAL=causal, WIDEN=widen(q), num_warps=8, num_stages=2,
    )  # fmt: skip
    lse = torch.empty((tokens, query_heads), dtype=torch.float32, device=q.device)
    count = tokens * query_heads
    lse_merge[(triton.cdiv(count, MERGED),)](part_max, part_sum, lse, parts, count, BLOCK=MERGED)
    return lse


def add_columns(
    values: Tensor,
    q: Tensor,
    lse: Tensor,
    k: Tensor,
    q_positions: Tensor,
    scale: float,
    how: How,
    *,
    logit_cap: float = 0.0,
    k_positions: Tensor | None = None,
    causal: bool = True,
    decay: float = 1.0,
    threshold: float = 0.0,
    seen: Tensor | None = None,
) -> None:
    """Add to `values`, float32 [Hq, n], what each row gets from every query; arguments as in `Running`.

    sum: its weight; squares; count: 1 if weight times the number of rows that the query sees is at least
    `threshold`; largest: instead of the sum the largest weight.  Before each query `values` is multiplied by
    `decay`.  `seen`, int64 [n], is added the number of queries that see the row.
    """
    tokens, query_heads, head_dim = q.shape
    rows, kv_heads = k.shape[:2]
    if tokens == 0 or rows == 0:
        return
    column_sums[(query_heads, triton.cdiv(rows, ROWS))](
        q, k, lse, q_positions, _positions(k, k_positions), values, q_positions if seen is None else seen,
        tokens, rows, q.stride(0), q.stride(1), k.stride(0), k.stride(1), scale, logit_cap,
        log2(max(decay, 1e-30)), threshold,
        G=query_heads // kv_heads, QUERIES=QUERIES, D=head_dim, DIM=padded(head_dim, 16), ROWS=ROWS,
        HOW=CODES[how], SEEN=seen is not None, CAP=logit_cap > 0, CAUSAL=causal, WIDEN=widen(q),
        num_warps=8, num_stages=2,
    )  # fmt: skip


def window_columns(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    scale: float,
    how: Literal["mean", "sum", "max", "squares", "l2"],
    *,
    logit_cap: float = 0.0,
    k_positions: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Attention of observed queries, joined over them: q [W, Hq, D], k [n, Hkv, D] -> float32 [Hq, n]."""
    kind: How = "largest" if how == "max" else "squares" if how in ("squares", "l2") else "sum"
    lse = log_sum_exp(q, k, q_positions, scale, logit_cap=logit_cap, k_positions=k_positions, causal=causal)
    values = torch.zeros((q.shape[1], k.shape[0]), dtype=torch.float32, device=q.device)
    add_columns(
        values, q, lse, k, q_positions, scale, kind,
        logit_cap=logit_cap, k_positions=k_positions, causal=causal,
    )  # fmt: skip
    if how == "mean":
        return values / q.shape[0]
    return values.sqrt() if how == "l2" else values


class ColumnSums:
    """`Running` for `accumulated` and `persistent`; means the same as `kernels/ref/score_running.py`."""

    def __init__(
        self,
        spec: Accumulated | Persistent,
        query_heads: int,
        scale: float,
        *,
        logit_cap: float = 0.0,
        first_query: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._spec = spec
        self._scale, self._logit_cap = scale, logit_cap
        self._first_query = first_query
        self._values = torch.zeros((query_heads, 0), device=device)
        self._seen = torch.zeros(0, dtype=torch.int64, device=device)

    def update(
        self, q: Tensor, lse: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor | None = None
    ) -> None:
        fresh = k.shape[0] - self._values.shape[1]
        self._values = torch.nn.functional.pad(self._values, (0, fresh))
        self._seen = torch.nn.functional.pad(self._seen, (0, fresh))
        counted = q_positions >= self._first_query
        how: How = "sum"
        decay, threshold = 1.0, 0.0
        match self._spec:
            case Accumulated():
                how = "squares" if self._spec.rows == "squares" else "sum"
                decay = self._spec.decay
            case Persistent():
                threshold = self._spec.threshold
                how = "count" if threshold > 0 else "sum"
        add_columns(
            self._values, q[counted], lse[counted], k, q_positions[counted], self._scale, how,
            logit_cap=self._logit_cap, k_positions=k_positions, decay=decay, threshold=threshold,
            seen=self._seen,
        )  # fmt: skip

    def keep(self, rows: Tensor) -> None:
        """Forget the rows that were evicted: `rows` int64 [m], ascending, stay."""
        self._values, self._seen = self._values[:, rows].contiguous(), self._seen[rows]

    def sums(self) -> Sums:
        return Sums(self._values, self._seen)


def _positions(k: Tensor, given: Tensor | None) -> Tensor:
    return torch.arange(k.shape[0], device=k.device) if given is None else given


SUMS = SumKernels("triton", log_sum_exp, partial(running_of, column_sums=ColumnSums))
