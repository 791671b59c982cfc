"""Random layers to score, and attention written out in float64 as loops would."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kvir.kernels.ref.score import score
from kvir.kernels.ref.score_expected import QueryMoments
from kvir.kernels.ref.score_needs import running, skips
from kvir.kernels.ref.score_running import ChunkSums, ColumnSums, log_sum_exp
from kvir.kernels.ref.score_values import gram
from kvir.kernels.score_ops import Moments, Rope, RunningScore, ScoreInputs, Sums
from kvir.policy_ir.pools import AveragePool, MaxPool
from kvir.policy_ir.scores import Noncausal, Persistent, Score

Array = np.ndarray


@dataclass(frozen=True)
class Shape:
    """A layer: rows, KV heads, query heads per KV head, head size."""

    n: int
    kv_heads: int
    group: int
    head_dim: int
    logit_cap: float = 0.0
    seed: int = 0

    def __str__(self) -> str:
        return f"n{self.n}-H{self.kv_heads}-G{self.group}-D{self.head_dim}" + (
            "-cap" if self.logit_cap else ""
        )


SHAPES = (
    Shape(1, 1, 1, 4),
    Shape(17, 2, 1, 8),
    Shape(61, 3, 3, 10),
    Shape(127, 1, 8, 16, logit_cap=3.0),
    Shape(203, 2, 3, 6),
)


@dataclass(frozen=True)
class Layer:
    """Random q, k, v of every token, and an output projection."""

    shape: Shape
    q: Tensor  # [n, Hq, D]
    k: Tensor  # [n, Hkv, D]
    v: Tensor
    w_o: Tensor  # [Hq, D, hidden]
    rope: Rope

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    def inputs(
        self, spec: Score, candidates: tuple[int, int], chunks: tuple[int, ...] = (23,)
    ) -> ScoreInputs:
        """Everything that `spec` may read; statistics were fed in chunks."""
        n = self.shape.n
        return ScoreInputs(
            k=self.k,
            v=self.v,
            candidates=candidates,
            scale=self.scale,
            logit_cap=self.shape.logit_cap,
            layer=5,
            q_obs=self.q,
            running={one: self.sums(one, chunks) for one in running(spec)},
            moments={skip: self._moments(skip, chunks) for skip in skips(spec)},
            w_o=self.w_o,
            rope=self.rope,
            budget_rows=max(1, n // 3),
        )

    def with_gram(self, inputs: ScoreInputs) -> ScoreInputs:
        return replace(inputs, w_o=None, gram=gram(self.w_o))

    def sums(self, spec: RunningScore, chunks: tuple[int, ...]) -> Sums:
        n, heads, cap = self.shape.n, self.q.shape[1], self.shape.logit_cap
        if isinstance(spec, Noncausal):
            sums: ColumnSums | ChunkSums = ChunkSums(spec, heads, self.scale, logit_cap=cap)
        else:
            last = n if not isinstance(spec, Persistent) or spec.history is None else spec.history
            sums = ColumnSums(spec, heads, self.scale, logit_cap=cap, first_query=max(0, n - last))
        for start, stop in cuts(n, chunks):
            q, k, positions = self.q[start:stop], self.k[:stop], torch.arange(start, stop)
            sums.update(q, log_sum_exp(q, k, positions, self.scale, logit_cap=cap), k, positions)
        return sums.sums()

    def _moments(self, skip: int, chunks: tuple[int, ...]) -> Moments:
        moments = QueryMoments(self.q.shape[1], self.shape.head_dim, self.rope, skip=skip)
        for start, stop in cuts(self.shape.n, chunks):
            moments.update(self.q[start:stop], torch.arange(start, stop))
        return moments.moments()

    # ---- the same in float64, one head and one query at a time ---------------------------------------------

    def logits(self, head: int, query: int) -> Array:
        """Scaled, capped logits of one query head and query over all rows: [n]."""
        k = self.k[:, head // self.shape.group].double().numpy()
        logits = k @ self.q[query, head].double().numpy() * self.scale
        return (
            self.shape.logit_cap * np.tanh(logits / self.shape.logit_cap) if self.shape.logit_cap else logits
        )

    def weights(self, head: int, query: int) -> Array:
        """A of one query head and query, causal: [n]."""
        return softmax(np.where(np.arange(self.shape.n) <= query, self.logits(head, query), -np.inf))

    def matrix(self, head: int) -> Array:
        """A of one query head: [n queries, n rows]."""
        return np.stack([self.weights(head, query) for query in range(self.shape.n)])

    def heads_of(self, kv_head: int) -> range:
        return range(kv_head * self.shape.group, (kv_head + 1) * self.shape.group)


def make(shape: Shape) -> Layer:
    generator = torch.Generator().manual_seed(shape.seed + shape.n)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    n, heads, dim = shape.n, shape.kv_heads * shape.group, shape.head_dim
    angles = torch.arange(n + 64)[:, None] * 50.0 ** -(torch.arange(dim // 2) / (dim // 2))[None, :]
    return Layer(
        shape,
        q=2 * normal(n, heads, dim),
        k=normal(n, shape.kv_heads, dim) + 0.3,
        v=normal(n, shape.kv_heads, dim),
        w_o=normal(heads, dim, 3 * dim),
        rope=Rope(angles.cos(), angles.sin()),
    )


def cuts(n: int, chunks: tuple[int, ...]) -> list[tuple[int, int]]:
    """[start, stop) of chunks; the lengths are used over and over."""
    bounds, i = [0], 0
    while bounds[-1] < n:
        bounds.append(min(n, bounds[-1] + chunks[i % len(chunks)]))
        i += 1
    return list(pairwise(bounds))


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max())
    return e / e.sum()


def pooled(x: Array, how: AveragePool | MaxPool | None) -> Array:
    if how is None:
        return x
    out, half, n = np.empty_like(x), how.width // 2, x.shape[-1]
    for j in range(n):
        near = x[..., max(0, j - half) : j + half + 1]
        out[..., j] = near.sum(-1) / how.width if isinstance(how, AveragePool) else near.max(-1)
    return out


def candidates(layer: Layer) -> tuple[int, int]:
    """All but a few first and last rows, where there are that many."""
    n = layer.shape.n
    return (min(3, n - 1), n - min(5, n // 3))


def check(spec: Score, layer: Layer, wanted: Array, rtol: float = 3e-5) -> None:
    """The score of candidates is `wanted` [Hkv, C], the others have none."""
    start, stop = candidates(layer)
    got = score(spec, layer.inputs(spec, (start, stop)))
    assert got.dtype == torch.float32
    assert got.shape == (layer.shape.kv_heads, layer.shape.n)
    outside = torch.ones(layer.shape.n, dtype=torch.bool)
    outside[start:stop] = False
    assert (got[:, outside] == -torch.inf).all()
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(got[:, start:stop].numpy(), wanted, rtol=rtol, atol=1e-6 * abs(wanted).max())
