"""Sums over all queries, fed chunk by chunk, equal the sums over the full attention matrix in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvir.kernels.ref.score_expected import QueryMoments
from kvir.kernels.ref.score_rope import mean_rotation, rotate, unrotate
from kvir.kernels.ref.score_running import ChunkSums, ColumnSums, log_sum_exp
from kvir.kernels.score_ops import Rope
from kvir.policy_ir.scores import Accumulated, Noncausal, Persistent
from support.score_cases import SHAPES, Layer, Shape, make, softmax

CHUNKS = [(1000,), (1,), (64, 3, 1, 40)]
CASES = [pytest.param(make(shape), id=str(shape)) for shape in SHAPES]


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("layer", CASES)
@pytest.mark.parametrize("decay", [1.0, 0.97])
@pytest.mark.parametrize("rows", ["sum", "squares"])
def test_accumulated(layer: Layer, chunks: tuple[int, ...], decay: float, rows: str) -> None:
    sums = layer.sums(Accumulated(rows=rows, decay=decay), chunks)  # type: ignore[arg-type]
    n = layer.shape.n
    ages = decay ** np.arange(n - 1, -1, -1)
    for head in range(layer.q.shape[1]):
        matrix = layer.matrix(head) ** (2 if rows == "squares" else 1)
        np.testing.assert_allclose(sums.values[head], ages @ matrix, rtol=2e-5, atol=1e-7)
    assert sums.seen.tolist() == list(range(n, 0, -1))


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("layer", CASES)
@pytest.mark.parametrize("spec", [Persistent(history=40), Persistent(history=None, threshold=2.0)], ids=str)
def test_persistent(layer: Layer, chunks: tuple[int, ...], spec: Persistent) -> None:
    sums = layer.sums(spec, chunks)
    n = layer.shape.n
    first = 0 if spec.history is None else max(0, n - spec.history)
    for head in range(layer.q.shape[1]):
        wanted, unsure, seen = np.zeros(n), np.zeros(n), np.zeros(n, dtype=int)
        for query in range(first, n):
            weights = layer.weights(head, query) * (query + 1)
            wanted += weights >= spec.threshold
            unsure += abs(weights - spec.threshold) < 1e-5  # float32 may fall on the other side
            seen[: query + 1] += 1
        assert (abs(sums.values[head].numpy() - wanted) <= unsure).all()
        assert sums.seen.tolist() == seen.tolist()


def test_persistent_without_a_threshold_sums_weights() -> None:
    layer = make(SHAPES[2])
    sums = layer.sums(Persistent(history=7, threshold=0.0), (5,))
    np.testing.assert_allclose(sums.values[4], layer.matrix(4)[-7:].sum(axis=0), rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("chunks", CHUNKS, ids=str)
@pytest.mark.parametrize("layer", CASES)
def test_noncausal(layer: Layer, chunks: tuple[int, ...]) -> None:
    sums = layer.sums(Noncausal(chunk=25), chunks)
    for head in range(layer.q.shape[1]):
        wanted = np.zeros(layer.shape.n)
        for query in range(layer.shape.n):
            rows = slice(query // 25 * 25, query // 25 * 25 + 25)
            wanted[rows] += softmax(layer.logits(head, query)[rows])
        np.testing.assert_allclose(sums.values[head], wanted, rtol=2e-5)


def test_noncausal_refuses_a_gap() -> None:
    layer = make(SHAPES[1])
    sums = ChunkSums(Noncausal(chunk=4), 2, layer.scale)
    with pytest.raises(ValueError, match="without gaps"):
        sums.update(layer.q[5:9], torch.zeros(4, 2), layer.k[:9], torch.arange(5, 9))


@pytest.mark.parametrize("layer", CASES)
def test_log_sum_exp(layer: Layer) -> None:
    n = layer.shape.n
    got = log_sum_exp(layer.q, layer.k, torch.arange(n), layer.scale, logit_cap=layer.shape.logit_cap)
    for head in range(layer.q.shape[1]):
        for query in range(n):
            wanted = np.logaddexp.reduce(layer.logits(head, query)[: query + 1])
            assert abs(float(got[query, head]) - wanted) < 1e-5


def test_sums_go_on_after_an_eviction() -> None:
    """Rows that stay keep what they had; later queries share their weight among the rows that are left."""
    layer = make(SHAPES[4])
    spec = Accumulated()
    left = torch.tensor([*range(4), *range(40, 100)])
    positions = torch.cat([left, torch.arange(100, 203)])
    q, k = layer.q[100:], layer.k[positions]
    sums = ColumnSums(spec, 6, layer.scale)
    before = torch.arange(100)
    sums.update(
        layer.q[:100], log_sum_exp(layer.q[:100], layer.k[:100], before, layer.scale), layer.k[:100], before
    )
    sums.keep(left)
    later = torch.arange(100, 203)
    lse = log_sum_exp(q, k, later, layer.scale, k_positions=positions)
    sums.update(q, lse, k, later, positions)
    for head in range(6):
        wanted = np.zeros(len(positions))
        wanted[: len(left)] = layer.matrix(head)[:100, left].sum(axis=0)
        for query in range(100, 203):
            seen = positions.numpy()[positions.numpy() <= query]
            wanted[: len(seen)] += softmax(layer.logits(head, query)[seen])
        np.testing.assert_allclose(sums.sums().values[head], wanted, rtol=2e-5, atol=1e-7)
    assert sums.sums().seen.tolist() == [203 - int(p) for p in positions]
    with pytest.raises(ValueError, match="every row of the prompt"):
        ChunkSums(Noncausal(), 6, layer.scale).update(q, lse, k, later, positions)


def test_memory_is_linear_in_the_length() -> None:
    """The state of a long sequence is two numbers per row and query head."""
    layer = make(Shape(203, 2, 3, 6))
    sums = ColumnSums(Accumulated(), 6, layer.scale)
    positions = torch.arange(203)
    sums.update(layer.q, log_sum_exp(layer.q, layer.k, positions, layer.scale), layer.k, positions)
    held = sum(x.numel() for x in vars(sums).values() if isinstance(x, torch.Tensor))
    assert held == 203 * (6 + 1)


@pytest.mark.parametrize("skip", [0, 4])
def test_moments_are_those_of_queries_before_rotation(skip: int) -> None:
    layer = make(SHAPES[2])
    n = layer.shape.n
    moments = QueryMoments(9, 10, layer.rope, skip=skip)
    rotated = rotate(layer.q, layer.rope, torch.arange(n))
    for start in range(0, n, 7):
        moments.update(rotated[start : start + 7], torch.arange(start, min(n, start + 7)))
    plain = layer.q[skip:].double()
    np.testing.assert_allclose(moments.moments().mean, plain.mean(dim=0), atol=1e-6)
    for head in range(9):
        wanted = np.cov(plain[:, head].T.numpy(), bias=True)
        np.testing.assert_allclose(moments.moments().covariance[head], wanted, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(interleaved: bool) -> None:
    """Undone exactly, scaled tables included; the mean rotation is the mean of rotations."""
    angles = torch.arange(40)[:, None] * torch.tensor([1.0, 0.3, 0.01])
    rope = Rope(1.2 * angles.cos(), 1.2 * angles.sin(), interleaved)
    x = torch.randn(9, 2, 8, generator=torch.Generator().manual_seed(0))  # 6 of 8 dimensions turn
    positions = torch.arange(11, 20)
    turned = rotate(x, rope, positions)
    assert torch.allclose(unrotate(turned, rope, positions), x, atol=1e-6)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    pair = [0, 1] if interleaved else [0, 3]
    angle = float(angles[11, 0])
    wanted = 1.2 * (x[0, 0, pair[0]] * np.cos(angle) - x[0, 0, pair[1]] * np.sin(angle))
    assert abs(float(turned[0, 0, pair[0]] - wanted)) < 1e-6
    mean = mean_rotation(rope, 20, 15, 8)
    each = torch.stack([rotate(x[:1], rope, torch.tensor([p]))[0] for p in range(20, 35)])
    assert torch.allclose(x[0] @ mean.T, each.mean(dim=0), atol=1e-6)


def test_the_mean_rotation_ends_where_the_model_does() -> None:
    angles = torch.outer(torch.arange(50.0), torch.tensor([1.0, 0.1]))
    rope = Rope(angles.cos(), angles.sin())
    inside = mean_rotation(rope, 40, 10, 4)
    assert torch.equal(mean_rotation(rope, 40, 512, 4), inside)
    assert torch.equal(mean_rotation(rope, 50, 512, 4), mean_rotation(rope, 49, 1, 4))
