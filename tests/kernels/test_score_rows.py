"""Scores from keys and values equal their formulas, written out in float64 with loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvir.kernels.ref.score import score
from kvir.kernels.ref.score_rope import rotate
from kvir.policy_ir import scores as ir
from support.score_cases import SHAPES, Array, Layer, make, softmax

CASES = [pytest.param(make(shape), id=str(shape)) for shape in SHAPES]


def scored(spec: ir.Score, layer: Layer, candidates: tuple[int, int]) -> Array:
    """[Hkv, C]."""
    return score(spec, layer.inputs(spec, candidates))[:, slice(*candidates)].numpy()


def keys(layer: Layer, head: int) -> Array:
    return layer.k[:, head].double().numpy()


def close(got: Array, wanted: object, rtol: float = 3e-5) -> None:
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(got, wanted, rtol=rtol, atol=1e-6 * abs(wanted).max())


@pytest.mark.parametrize("layer", CASES)
def test_key_norm(layer: Layer) -> None:
    n, heads = layer.shape.n, range(layer.shape.kv_heads)
    close(scored(ir.KeyNorm(), layer, (0, n)), [-np.linalg.norm(keys(layer, h), axis=1) for h in heads])
    close(scored(ir.KeyNorm(norm="l1"), layer, (0, n)), [-abs(keys(layer, h)).sum(axis=1) for h in heads])


@pytest.mark.parametrize("layer", CASES)
@pytest.mark.parametrize("anchor", ["directions", "keys"])
def test_key_diff(anchor: str, layer: Layer) -> None:
    spec = ir.KeyDiff(anchor=anchor)  # type: ignore[arg-type]
    start = min(2, layer.shape.n - 1)
    wanted = []
    for head in range(layer.shape.kv_heads):
        k = keys(layer, head)
        directions = k / np.linalg.norm(k, axis=1, keepdims=True)
        mean = directions.mean(axis=0) if anchor == "directions" else k.mean(axis=0)
        wanted.append(-(directions @ mean / np.linalg.norm(mean))[start:])
    close(scored(spec, layer, (start, layer.shape.n)), wanted)


def test_key_diff_before_rotation() -> None:
    layer = make(SHAPES[2])
    turned = replace(layer, k=rotate(layer.k, layer.rope, torch.arange(layer.shape.n)))
    close(scored(ir.KeyDiff(rotated=False), turned, (0, 61)), scored(ir.KeyDiff(), layer, (0, 61)))


@pytest.mark.parametrize("layer", CASES)
@pytest.mark.parametrize("parts", ["both", "keys", "values"])
@pytest.mark.parametrize("rank", ["chunk", "all"])
def test_lagkv(rank: str, parts: str, layer: Layer) -> None:
    n, start, lag = layer.shape.n, min(4, layer.shape.n - 1), 13
    stop = max(start + 1, n - 5)
    spec = ir.LagKV(lag=lag, rank=rank, parts=parts)  # type: ignore[arg-type]
    wanted = np.ones((layer.shape.kv_heads, n))
    for head in range(layer.shape.kv_heads):
        for first in range(start, n - 2 * lag + 1, lag):
            spreads = []
            for x in {"both": (layer.k, layer.v), "keys": (layer.k,), "values": (layer.v,)}[parts]:
                rows = x[:, head].double().numpy()
                after = rows[first + lag : first + 2 * lag]
                low, high = after.min(axis=0), after.max(axis=0)
                z = (rows[first : first + lag] - low) / (high - low)
                spreads.append(softmax(z.std(axis=1, ddof=1)))
            chunk = np.mean(spreads, axis=0)
            if rank == "chunk":
                chunk = np.array([(chunk < x).sum() for x in chunk]) / lag
            wanted[head, first : first + lag] = chunk
    close(scored(spec, layer, (start, stop)), wanted[:, start:stop])


def test_lagkv_ranks_equal_rows_older_first_and_bears_constant_channels() -> None:
    layer = make(SHAPES[1])
    flat = replace(layer, k=torch.ones_like(layer.k), v=torch.ones_like(layer.v))
    got = scored(ir.LagKV(lag=4), flat, (0, 17))
    assert got[0, :4].tolist() == [0.75, 0.5, 0.25, 0.0]


@pytest.mark.parametrize("layer", CASES)
@pytest.mark.parametrize("combine", ["product", "mean", "keys", "values"])
def test_cur(combine: str, layer: Layer) -> None:
    n = layer.shape.n
    spec = ir.Cur(window=10, combine=combine)  # type: ignore[arg-type]
    wanted = []
    for head in range(layer.shape.kv_heads):
        shares = []
        for x in (layer.k, layer.v):
            energy = (x[:, head].double().numpy() ** 2).sum(axis=1)
            shares.append([energy[j] / energy[j // 10 * 10 : j // 10 * 10 + 10].sum() for j in range(n)])
        k, v = np.array(shares)
        joined = {"product": k * v, "mean": (k + v) / 2, "keys": k, "values": v}[combine]
        wanted.append(joined / joined.sum())
    close(scored(spec, layer, (0, n)), wanted)


@pytest.mark.parametrize("layer", CASES)
@pytest.mark.parametrize("spare", ["last", "first", "none"])
@pytest.mark.parametrize("normal", [True, False])
def test_redundancy(normal: bool, spare: str, layer: Layer) -> None:
    n = layer.shape.n
    spec = ir.Redundancy(threshold=0.3, spare=spare, softmax=normal)  # type: ignore[arg-type]
    wanted = []
    for head in range(layer.shape.kv_heads):
        directions = keys(layer, head) / np.linalg.norm(keys(layer, head), axis=1, keepdims=True)
        cosines = directions @ directions.T
        np.fill_diagonal(cosines, 0)
        for row in cosines:
            alike = np.nonzero(row > 0.3)[0]
            if len(alike) and spare != "none":
                row[alike[-1] if spare == "last" else alike[0]] = 0
        mean = cosines.mean(axis=0)
        wanted.append(-(softmax(mean) if normal else mean))
    close(scored(spec, layer, (0, n)), wanted)


def test_redundancy_of_many_rows_goes_in_blocks() -> None:
    torch.manual_seed(0)
    layer = make(replace(SHAPES[1], n=600))
    directions = layer.k[:, 0] / layer.k[:, 0].norm(dim=-1, keepdim=True)
    cosines = (directions @ directions.T).fill_diagonal_(0)
    spec = ir.Redundancy(spare="none", softmax=False)
    close(scored(spec, layer, (0, 600))[0], -cosines.mean(dim=0), rtol=1e-4)


@pytest.mark.parametrize("layer", CASES)
def test_leverage(layer: Layer) -> None:
    """Rows of a wide sketch of few rows have leverage near 1; in general it is the hat matrix's diagonal."""
    n, dims = layer.shape.n, 3
    generator = torch.Generator().manual_seed(7)
    sketch = (torch.randn(layer.shape.head_dim, dims, generator=generator) / dims**0.5).double().numpy()
    turned = replace(layer, k=rotate(layer.k, layer.rope, torch.arange(n)))
    wanted = []
    for head in range(layer.shape.kv_heads):
        x = (keys(layer, head) - keys(layer, head).mean(axis=0)) @ sketch
        wanted.append(np.diag(x @ np.linalg.inv(x.T @ x + 0.01 * np.eye(dims)) @ x.T))
    got = scored(ir.Leverage(dims=dims, seed=7), turned, (0, n))
    np.testing.assert_allclose(got, np.stack(wanted), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("layer", CASES)
def test_value_leverage(layer: Layer) -> None:
    n, dim = layer.shape.n, layer.shape.head_dim
    spec = ir.ValueLeverage(sharpness=3.0, future=20)
    inputs = layer.inputs(spec, (0, n))
    turned = rotate(inputs.moments[4].mean[None].repeat(20, 1, 1), layer.rope, torch.arange(n, n + 20))
    expected = turned.mean(dim=0).double().numpy()
    wanted = []
    for kv_head in range(layer.shape.kv_heads):
        k, v = keys(layer, kv_head), layer.v[:, kv_head].double().numpy()
        per_head = []
        for head in layer.heads_of(kv_head):
            norms = np.linalg.norm(k, axis=1) * max(np.linalg.norm(expected[head]), 1e-12)
            cosines = k @ expected[head] / norms
            w = np.exp(3 * (cosines - cosines.max()))
            matrix = np.eye(dim) + (v * w[:, None]).T @ v
            per_head.append(w * (v @ np.linalg.inv(matrix) * v).sum(axis=1))
        wanted.append(np.mean(per_head, axis=0))
    close(score(spec, inputs).numpy(), wanted, rtol=1e-3)


def test_random_depends_on_seed_layer_head_and_position_alone() -> None:
    layer = make(SHAPES[4])
    spec = ir.Random(seed=3)
    inputs = layer.inputs(spec, (0, 203))
    whole = score(spec, inputs)
    part = replace(
        inputs, k=inputs.k[50:], v=inputs.v[50:], positions=torch.arange(50, 203), candidates=(0, 153)
    )
    assert torch.equal(score(spec, part), whole[:, 50:])
    for other in (score(ir.Random(seed=4), inputs), score(spec, replace(inputs, layer=6)), whole.flip(0)):
        assert not torch.equal(other, whole)
    many = score(spec, replace(inputs, k=torch.zeros(5000, 8, 6), candidates=(0, 5000)))
    assert many.min() >= 0
    assert many.max() < 1
    counts = torch.histc(many, bins=10, min=0, max=1)
    assert (abs(counts / 4000 - 1) < 0.06).all()
    assert abs(float(torch.corrcoef(torch.stack([many[0, 1:], many[0, :-1]]))[0, 1])) < 0.05
