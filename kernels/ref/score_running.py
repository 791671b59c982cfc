"""Column sums of attention over many queries, chunk by chunk, without the matrix of all queries and rows.

With the log-sum-exp (LSE) of each query, which attention computes anyhow, its weights are
A[q, j] = exp(logit[q, j] - lse[q]): a second pass in blocks of queries adds them up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvir.kernels.ref.score_attention import logits_of, reduce
from kvir.kernels.score_ops import ColumnSumsOf, Running, RunningScore, ScoreInputs, SumKernels, Sums
from kvir.policy_ir.scores import Accumulated, Noncausal, Persistent

QUERY_BLOCK = 64  # bounds memory: Hq x QUERY_BLOCK x n floats


class ColumnSums:
    """`Running` for `accumulated` and `persistent`, in float32.

    `first_query`: the position of the first query that counts; a score of the last m queries of a sequence of
    n tokens starts at n - m.
    """

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
        q, lse, k, q_positions = q[counted].float(), lse[counted], k.float(), q_positions[counted]
        for start in range(0, q.shape[0], QUERY_BLOCK):
            block = slice(start, start + QUERY_BLOCK)
            self._add(q[block], lse[block], k, q_positions[block], k_positions)

    def keep(self, rows: Tensor) -> None:
        """Forget the rows that were evicted: `rows` int64 [m], ascending, stay."""
        self._values, self._seen = self._values[:, rows], self._seen[rows]

    def sums(self) -> Sums:
        return Sums(self._values, self._seen)

    def _add(
        self, q: Tensor, lse: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor | None
    ) -> None:
        positions = torch.arange(k.shape[0], device=k.device) if k_positions is None else k_positions
        visible = positions[None, :] <= q_positions[:, None]  # [T, n]
        logits = logits_of(q, k, self._scale, self._logit_cap).flatten(0, 1)  # [Hq, T, n]
        weights = torch.exp(logits - lse.T[:, :, None]).masked_fill(~visible, 0)
        match self._spec:
            case Accumulated(rows=rows, decay=decay):
                added = weights.square() if rows == "squares" else weights
                ages = torch.arange(q.shape[0] - 1, -1, -1, device=q.device)
                self._values *= decay ** q.shape[0]
                self._values += (added * torch.pow(decay, ages.float())[:, None]).sum(dim=1)
            case Persistent(threshold=threshold):
                if threshold > 0:
                    weights = (weights * visible.sum(dim=1)[:, None] >= threshold).float() * visible
                self._values += weights.sum(dim=1)
        self._seen += visible.sum(dim=0)


class ChunkSums:
    """`Running` for `noncausal`: attention without a mask among the rows of aligned chunks; needs no LSE.

    A chunk that the calls have not finished waits; `sums` counts it as it is.  For whole prompts: no row
    may be evicted in between.
    """

    def __init__(
        self,
        spec: Noncausal,
        query_heads: int,
        scale: float,
        *,
        logit_cap: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._spec = spec
        self._scale, self._logit_cap = scale, logit_cap
        self._done = torch.zeros((query_heads, 0), device=device)
        self._waiting_q: Tensor | None = None
        self._waiting_k: Tensor | None = None

    def update(
        self, q: Tensor, lse: Tensor, k: Tensor, q_positions: Tensor, k_positions: Tensor | None = None
    ) -> None:
        del lse
        if k_positions is not None:
            raise ValueError("`noncausal` sums need every row of the prompt")
        q_all = q if self._waiting_q is None else torch.cat([self._waiting_q, q])
        start = self._done.shape[1]
        if int(q_positions[0]) + q.shape[0] != start + q_all.shape[0]:
            raise ValueError("queries must come in order and without gaps from position 0 on")
        whole = q_all.shape[0] - q_all.shape[0] % self._spec.chunk
        for first in range(0, whole, self._spec.chunk):
            rows = slice(first, first + self._spec.chunk)
            self._done = torch.cat([self._done, self._sums(q_all[rows], k[start:][rows])], dim=1)
        self._waiting_q, self._waiting_k = q_all[whole:], k[start + whole :]

    def sums(self) -> Sums:
        values = self._done
        if self._waiting_q is not None and self._waiting_k is not None and self._waiting_q.shape[0]:
            values = torch.cat([values, self._sums(self._waiting_q, self._waiting_k)], dim=1)
        return Sums(values, torch.ones(values.shape[1], dtype=torch.int64, device=values.device))

    def _sums(self, q: Tensor, k: Tensor) -> Tensor:
        logits = logits_of(q.float(), k.float(), self._scale, self._logit_cap)
        return torch.softmax(logits, dim=-1).sum(dim=2).flatten(0, 1)


def running_of(
    spec: RunningScore,
    query_heads: int,
    scale: float,
    *,
    tokens: int,
    logit_cap: float = 0.0,
    device: torch.device | str = "cpu",
    column_sums: ColumnSumsOf = ColumnSums,
) -> Running:
    """Empty sums of a score for a sequence that will have `tokens` tokens when it is asked.

    `column_sums` makes those of `accumulated` and `persistent`; chunks of `noncausal` are small enough for
    plain torch everywhere.
    """
    if isinstance(spec, Noncausal):
        return ChunkSums(spec, query_heads, scale, logit_cap=logit_cap, device=device)
    history = spec.history if isinstance(spec, Persistent) else None
    first = 0 if history is None else max(0, tokens - history)
    return column_sums(spec, query_heads, scale, logit_cap=logit_cap, first_query=first, device=device)


def log_sum_exp(
    q: Tensor,
    k: Tensor,
    q_positions: Tensor,
    scale: float,
    *,
    logit_cap: float = 0.0,
    k_positions: Tensor | None = None,
) -> Tensor:
    """What attention kernels give: q [T, Hq, D], k [n, Hkv, D], positions [T] and [n] -> float32 [T, Hq]."""
    out = torch.empty(q.shape[:2], device=q.device)
    positions = torch.arange(k.shape[0], device=k.device) if k_positions is None else k_positions
    for start in range(0, q.shape[0], QUERY_BLOCK):
        block = slice(start, start + QUERY_BLOCK)
        logits = logits_of(q[block].float(), k.float(), scale, logit_cap).flatten(0, 1)
        hidden = positions[None, :] > q_positions[block][:, None]
        out[block] = torch.logsumexp(logits.masked_fill(hidden, -torch.inf), dim=-1).T
    return out


def running_score(spec: RunningScore, inputs: ScoreInputs) -> Tensor:
    """float32 [Hkv, C], value norms and pooling left out (H2O, arXiv:2306.14048, Scissorhands, 2305.17118).

    Raises ValueError if the sums are missing or are not those of the rows held.
    """
    if spec not in inputs.running:
        raise ValueError(f"the running sums of {spec} are missing")
    sums = inputs.running[spec]
    if sums.values.shape[1] != inputs.k.shape[0]:
        raise ValueError(f"running sums of {sums.values.shape[1]} rows, {inputs.k.shape[0]} rows are held")
    values = sums.values
    match spec:
        case Accumulated(normalise="visible") | Persistent(normalise="seen"):
            values = values / sums.seen.clamp_min(1)
        case _:
            pass
    per_head = values[:, slice(*inputs.candidates)].unflatten(0, (inputs.k.shape[1], -1))
    return reduce(per_head, spec.group, dim=1)


SUMS = SumKernels("ref", log_sum_exp, running_of)
