"""The contract of scoring and selecting: what goes in, what comes out, and the legend.

Legend, beside that of `kernels/ops.py`
    n     rows that a unit holds, in the order of their positions     C    candidates among them
    W     observed queries, the last ones                             G    query heads per KV head
    unit  one KV head of one layer

Rows that a term by position (`sink`, `recent`) or the rule's `region` keeps stay whatever their score is; the
others are *candidates*.  They are a run of rows, `candidates = (start, stop)`, and compete among themselves.
Scores are float32, larger stays; a row that is no candidate has the score -inf.

What a score reads is in `ScoreInputs`.  `needs(spec)` names the fields that must be given, beside `k`, `v`,
`candidates` and `scale`, and `observed_queries(spec)` says how many of the last queries must be computed and
not taken from a prefix cache: a number, or None for all of the sequence.

A layer whose heads hold different rows is scored in *parts*, KV heads with equally many rows each; scores
that are relative to the layer are so over all parts (`ScoreParts`).

Implementations: `kernels/ref` (plain torch, slow and obvious); sums also `kernels/triton`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, Protocol

from kvir.policy_ir.scores import Accumulated, Noncausal, Norm, Persistent, Score

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Need = Literal[
    "q_obs",  # the last queries, as many as `observed_queries` says
    "running",  # column sums over many queries, kept by `Running` across chunks
    "query_moments",  # mean and covariance of queries before rotation, over all queries but the first
    "projected_l1",  # norms of values through the output projection, or `w_o` to compute them
    "projected_l2",  # the same; the Gram matrices are enough
    "rope",  # tables of the rotation
    "budget_rows",  # the score depends on how many rows are chosen
]

RunningScore = Accumulated | Persistent | Noncausal  # scores that are sums over queries


@dataclass(frozen=True)
class Rope:
    """Rotation by position: dimensions i and i + R / 2 of the first R of a head turn together.

    `interleaved`: dimensions 2 i and 2 i + 1 do.  Tables may be scaled (YaRN); the inverse undoes that too.
    """

    cos: Tensor  # float32 [positions, R // 2]
    sin: Tensor  # float32 [positions, R // 2]
    interleaved: bool = False


@dataclass(frozen=True)
class Sums:
    """Sums over queries, per query head and row, and how many queries saw each row."""

    values: Tensor  # float32 [Hq, n]
    seen: Tensor  # int64 [n]


@dataclass(frozen=True)
class Moments:
    """Of the queries of a layer before rotation."""

    mean: Tensor  # float32 [Hq, D]
    covariance: Tensor  # float32 [Hq, D, D], divided by the number of queries


@dataclass(frozen=True)
class ScoreInputs:
    """What a runtime knows of one layer of one sequence when a selection runs."""

    k: Tensor  # [n, Hkv, D], with rotation
    v: Tensor  # [n, Hkv, D]
    candidates: tuple[int, int]  # rows [start, stop)
    scale: float  # of the logits, usually D ** -0.5
    logit_cap: float = 0.0  # 0: none; else cap * tanh(logit / cap)
    layer: int = 0  # index among the layers with a KV cache
    first_head: int = 0  # index in the layer of the first KV head given here
    positions: Tensor | None = None  # int64 [n], ascending; None: 0 .. n - 1
    bias: Tensor | None = None  # float32 [n, Hkv], added to logits after the cap: rows that were merged
    q_obs: Tensor | None = None  # [W, Hq, D], with rotation, in the order of positions
    q_positions: Tensor | None = None  # int64 [W]; None: the W last positions
    running: Mapping[RunningScore, Sums] = field(default_factory=dict)
    moments: Mapping[int, Moments] = field(default_factory=dict)  # by the number of first queries left out
    w_o: Tensor | None = None  # [Hq, D, hidden], the output projection's rows of each query head
    gram: Tensor | None = None  # float32 [Hq, D, D], w_o w_o' of each query head
    projected: Mapping[Norm, Tensor] = field(default_factory=dict)  # float32 [Hq, n], |v_j W_O|
    rope: Rope | None = None
    budget_rows: int | None = None  # rows that the term chooses in one unit
    inside_rows: int = 0  # rows of the other terms, where the budget counts them (`counts: kept`)


class ScoreRows(Protocol):
    """Scores of every row of one layer: float32 [Hkv, n], -inf for rows that are no candidates.

    `precision: model` computes weights in the type of k.  Raises ValueError, with its name, for an input that
    `needs(spec)` names and that is not there.
    """

    def __call__(
        self, spec: Score, inputs: ScoreInputs, precision: Literal["float32", "model"] = "float32"
    ) -> Tensor: ...


class ScoreParts(Protocol):
    """The same for a layer in parts: a float32 [Hkv of the part, n of the part] each."""

    def __call__(
        self, spec: Score, parts: Sequence[ScoreInputs], precision: Literal["float32", "model"] = "float32"
    ) -> list[Tensor]: ...


class Running(Protocol):
    """Column sums of attention over many queries, in blocks, without the matrix of all queries and rows.

    `update` is called once per chunk, after the chunk's keys are known, with every query in order.  `lse` is
    the natural log of the sum of exp(logit) over visible rows, after scale and cap, as attention kernels have
    it.  `k_positions` says where rows come from once some have been evicted.  Memory is linear in n.
    """

    def update(
        self,
        q: Tensor,  # [T, Hq, D], with rotation
        lse: Tensor,  # float32 [T, Hq]
        k: Tensor,  # [n, Hkv, D], all rows up to the last query
        q_positions: Tensor,  # int64 [T], ascending
        k_positions: Tensor | None = None,  # int64 [n], ascending; None: 0 .. n - 1
    ) -> None: ...

    def sums(self) -> Sums: ...


class LogSumExp(Protocol):
    """The natural log of the sum of exp(logit) over the rows that each query sees: float32 [T, Hq]."""

    def __call__(
        self,
        q: Tensor,  # [T, Hq, D]
        k: Tensor,  # [n, Hkv, D]
        q_positions: Tensor,  # int64 [T]
        scale: float,
        *,
        logit_cap: float = 0.0,
        k_positions: Tensor | None = None,  # int64 [n]; None: 0 .. n - 1
    ) -> Tensor: ...


class RunningOf(Protocol):
    """Empty sums of a score, on a device, for a sequence that will have `tokens` tokens when it is asked."""

    def __call__(
        self,
        spec: RunningScore,
        query_heads: int,
        scale: float,
        *,
        tokens: int,
        logit_cap: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> Running: ...


class ColumnSumsOf(Protocol):
    """Empty column sums; queries before `first_query` do not count."""

    def __call__(
        self,
        spec: Accumulated | Persistent,
        query_heads: int,
        scale: float,
        *,
        logit_cap: float = 0.0,
        first_query: int = 0,
        device: torch.device | str = "cpu",
    ) -> Running: ...


@dataclass(frozen=True)
class SumKernels:
    """An implementation of sums over all queries."""

    name: str
    log_sum_exp: LogSumExp
    running_of: RunningOf


@dataclass(frozen=True)
class UnitScores:
    """What one unit offers to a selection."""

    layer: int
    head: int
    scores: Tensor  # float32 [n]
    candidates: tuple[int, int]  # rows [start, stop)
    positions: Tensor | None = None  # int64 [n], ascending; None: 0 .. n - 1


@dataclass(frozen=True)
class Take:
    """How many candidates a group of rivals keeps.

    `rows` is the total of the group.  Each unit keeps at least its best `safe_rows` and at most its best
    `cap_rows`; `blend` (a, b) replaces what it won, c, by c (1 - a) + a b rounded to nearest, halves up.
    """

    rows: int
    safe_rows: int = 0
    cap_rows: int | None = None
    blend: tuple[float, Fraction] | None = None


class SelectTopK(Protocol):
    """Candidates that stay, per unit: int64 [kept], ascending rows.

    All units are rivals for `take.rows`: their rows are taken by falling score; among equals the older (or
    newer) row first, then the lower layer, then the lower head.  `ties` are lists of units (by index) that
    keep the same rows, ranked by the reduced score; a row of theirs counts once per unit.  `block`: rows go
    in blocks of positions [i block, (i + 1) block), ranked by the mean score of their candidates; the first
    block that does not fit ends the choice.  Raises ValueError for a NaN.
    """

    def __call__(
        self,
        units: Sequence[UnitScores],
        take: Take,
        *,
        ties: Sequence[Sequence[int]] = (),
        tie_reduce: Literal["mean", "max", "sum"] = "mean",
        block: int = 1,
        on_equal: Literal["older", "newer"] = "older",
    ) -> list[Tensor]: ...
