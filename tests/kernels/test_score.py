"""Every score equals its formula, written out in float64 with loops, on odd shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvir.kernels.ref.score import score, score_parts
from kvir.kernels.ref.score_rope import unrotate
from kvir.kernels.score_ops import ScoreInputs
from kvir.policy_ir import scores as ir
from support.score_cases import SHAPES, Layer, candidates, check, make, pooled, softmax

CASES = [pytest.param(make(shape), id=str(shape)) for shape in SHAPES]


# ---- sums over queries -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", CASES)
def test_accumulated(layer: Layer) -> None:
    n, (start, stop) = layer.shape.n, candidates(layer)
    sums = [
        [layer.matrix(head).sum(axis=0) for head in layer.heads_of(kv_head)]
        for kv_head in range(layer.shape.kv_heads)
    ]
    check(ir.Accumulated(), layer, np.mean(sums, axis=1)[:, start:stop])
    visible = np.arange(n, 0, -1)
    check(
        ir.Accumulated(normalise="visible", group="max"),
        layer,
        (np.max(sums, axis=1) / visible)[:, start:stop],
    )


@pytest.mark.parametrize("layer", CASES)
def test_persistent(layer: Layer) -> None:
    spec = ir.Persistent(history=11, threshold=0.0)
    n, (start, stop) = layer.shape.n, candidates(layer)
    seen = np.minimum(min(n, 11), n - np.arange(n))
    wanted = [
        np.mean([layer.matrix(head)[-11:].sum(axis=0) / seen for head in layer.heads_of(kv_head)], axis=0)
        for kv_head in range(layer.shape.kv_heads)
    ]
    check(spec, layer, np.stack(wanted)[:, start:stop])


@pytest.mark.parametrize("layer", CASES)
def test_noncausal(layer: Layer) -> None:
    start, stop = candidates(layer)
    spec = ir.Noncausal(chunk=20)
    wanted = []
    for kv_head in range(layer.shape.kv_heads):
        total = np.zeros(layer.shape.n)
        for head in layer.heads_of(kv_head):
            for query in range(layer.shape.n):
                rows = slice(query // 20 * 20, query // 20 * 20 + 20)
                total[rows] += softmax(layer.logits(head, query)[rows]) / layer.shape.group
        norms = layer.v[:, kv_head].double().norm(dim=-1).numpy()
        wanted.append(pooled((total * norms)[start:stop], spec.pool))
    check(spec, layer, np.stack(wanted))


@pytest.mark.parametrize("layer", CASES)
@pytest.mark.parametrize("value_norm", [True, False])
def test_expected_attention(value_norm: bool, layer: Layer) -> None:
    """The mean of exp(q k) over Gaussian queries, by the moments; rotations are averaged one by one."""
    n, dim, (start, stop) = layer.shape.n, layer.shape.head_dim, candidates(layer)
    spec = ir.ExpectedAttention(future=33, skip=2, value_norm=value_norm, epsilon=0.01)
    plain = unrotate(layer.q, layer.rope, torch.arange(n))[2:].double().numpy()
    turn = np.zeros((dim, dim))
    half = dim // 2
    for position in range(n, n + 33):
        cos, sin = layer.rope.cos[position].double().numpy(), layer.rope.sin[position].double().numpy()
        for i in range(half):
            turn[i, i] += cos[i] / 33
            turn[half + i, half + i] += cos[i] / 33
            turn[i, half + i] -= sin[i] / 33
            turn[half + i, i] += sin[i] / 33
    wanted = []
    for kv_head in range(layer.shape.kv_heads):
        k = layer.k[start:stop, kv_head].double().numpy()
        per_head = []
        for head in layer.heads_of(kv_head):
            q = plain[:, head] if len(plain) else np.zeros((1, dim))
            mean, cov = turn @ q.mean(axis=0), turn @ np.cov(q.T, bias=True) @ turn.T
            per_head.append(softmax(k @ mean * layer.scale + ((k @ cov) * k).sum(-1) * layer.scale**2 / 2))
        norms = layer.v[start:stop, kv_head].double().norm(dim=-1).numpy()
        wanted.append((np.mean(per_head, axis=0) + 0.01) * norms if value_norm else np.mean(per_head, axis=0))
    check(spec, layer, np.stack(wanted), rtol=1e-4)


# ---- scores of scores --------------------------------------------------------------------------------------


def test_rkv_weighs_importance_against_redundancy() -> None:
    layer = make(SHAPES[2])
    spec = ir.Rkv(weight=0.3)
    inputs = layer.inputs(spec, candidates(layer))
    importance, alike = score(spec.importance, inputs), score(spec.redundancy, inputs)
    assert torch.equal(score(spec, inputs), 0.3 * importance + 0.7 * alike)


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_criticalkv_takes_its_first_stage_by_the_base(norm: ir.Norm) -> None:
    layer = make(SHAPES[4])
    start, stop = candidates(layer)
    spec = ir.CriticalKV(base=ir.Attention(window=8), fixed=0.4, norm=norm)
    # 50 rows, 7 of them from other terms: int(0.4 * 57) = 22 come first, 15 of them candidates
    inputs = replace(layer.inputs(spec, (start, stop)), budget_rows=50, inside_rows=7)
    got = score(spec, inputs)[:, start:stop]
    base = score(spec.base, inputs)[:, start:stop]
    order = 1 if norm == "l1" else 2
    for head in range(2):
        first = base[head].argsort(descending=True)[:15]
        assert (got[head, first] == torch.inf).all()
        assert (got[head] == torch.inf).sum() == 15
        norms = [
            torch.linalg.vector_norm(layer.v[start:stop, head] @ layer.w_o[h], order, dim=-1)
            for h in layer.heads_of(head)
        ]
        rest = torch.ones(stop - start, dtype=torch.bool)
        rest[first] = False
        wanted = (base[head] + 1e-4) * torch.stack(norms).mean(dim=0)
        assert torch.allclose(got[head, rest], wanted[rest], rtol=1e-5)


def test_value_weighted_and_sum() -> None:
    layer = make(SHAPES[2])
    start, stop = candidates(layer)
    base = ir.KeyNorm()
    weighted = ir.ValueWeighted(base=base, norm="l1", epsilon=9.0)
    parts = (
        ir.Part(score=base, weight=2.0, scale="z_score"),
        ir.Part(score=ir.Random(), scale="max"),
        ir.Part(score=weighted, weight=-0.5, scale="softmax"),
    )
    inputs = layer.inputs(ir.Sum(parts=parts), (start, stop))
    keys, noise = score(base, inputs)[:, start:stop], score(ir.Random(), inputs)[:, start:stop]
    values = score(weighted, inputs)[:, start:stop]
    assert torch.allclose(values, (keys + 9) * layer.v[start:stop].abs().sum(dim=-1).T)
    shares = torch.softmax(values.flatten(), 0).view_as(values)
    wanted = 2 * (keys - keys.mean()) / keys.std() + noise / noise.max() - 0.5 * shares
    assert torch.allclose(score(ir.Sum(parts=parts), inputs)[:, start:stop], wanted, atol=1e-6)


def test_no_candidates_and_wrong_candidates() -> None:
    layer = make(SHAPES[1])
    assert (score(ir.Rkv(), layer.inputs(ir.Rkv(), (17, 17))) == -torch.inf).all()
    with pytest.raises(ValueError, match="no run of the 17 rows"):
        score(ir.KeyNorm(), layer.inputs(ir.KeyNorm(), (3, 18)))


# ---- heads with different rows -----------------------------------------------------------------------------

PARTED = [
    ir.LaProx(window=7),
    ir.Rkv(importance=ir.LaProx(window=7)),
    ir.ValueWeighted(base=ir.LaProx(window=7)),
    ir.CriticalKV(base=ir.LaProx(window=7)),
    ir.Random(),
    ir.Sum(parts=tuple(ir.Part(score=ir.KeyNorm(), scale=s) for s in ("none", "z_score", "softmax", "max"))),
]


@pytest.mark.parametrize("spec", PARTED, ids=lambda s: type(s).__name__)
def test_parts_of_a_layer_are_the_layer(spec: ir.Score) -> None:
    """Scores that are relative to the layer stay so when its heads are given one by one."""
    layer = make(SHAPES[2])
    whole = layer.inputs(spec, (3, 50))
    got = torch.cat(score_parts(spec, [of_head(whole, head) for head in range(3)]))
    assert torch.allclose(got, score(spec, whole), rtol=1e-5, atol=1e-9)


def test_parts_may_hold_different_rows() -> None:
    layer = make(SHAPES[2])
    spec = ir.LaProx(window=7)
    whole = layer.inputs(spec, (0, 61))
    first, second = of_head(whole, 0), of_head(whole, 1)
    rows = torch.arange(20, 61)
    assert second.q_obs is not None
    short = replace(
        second, k=second.k[20:], v=second.v[20:], positions=rows, candidates=(0, 36), q_obs=second.q_obs[20:]
    )
    none = replace(first, candidates=(9, 9))
    a, b, c = score_parts(spec, [first, short, none])
    assert (a.shape, b.shape, c.shape) == ((1, 61), (1, 41), (1, 61))
    assert float(a.sum() + b[:, :36].sum()) == pytest.approx(1, abs=1e-5)
    assert (c == -torch.inf).all()
    assert score_parts(spec, [none])[0].tolist() == c.tolist()


def of_head(whole: ScoreInputs, head: int) -> ScoreInputs:
    """One KV head of a layer and its query heads."""
    assert whole.q_obs is not None
    assert whole.w_o is not None
    group = whole.q_obs.shape[1] // whole.k.shape[1]
    queries = slice(head * group, (head + 1) * group)
    return replace(
        whole,
        k=whole.k[:, head : head + 1],
        v=whole.v[:, head : head + 1],
        q_obs=whole.q_obs[:, queries],
        w_o=whole.w_o[queries],
        first_head=head,
    )
