"""Every score equals its formula, written out in float64 with loops, on odd shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvir.kernels.ref.score import score, score_per_query
from kvir.kernels.ref.score_rope import unrotate
from kvir.kernels.ref.score_values import gram, projected_norms, projected_norms_gram
from kvir.policy_ir import scores as ir
from kvir.policy_ir.pools import AveragePool, MaxPool
from support.score_cases import SHAPES, Array, Layer, make, softmax

CASES = [pytest.param(make(shape), id=str(shape)) for shape in SHAPES]


def candidates(layer: Layer) -> tuple[int, int]:
    """All but a few first and last rows, where there are that many."""
    n = layer.shape.n
    return (min(3, n - 1), n - min(5, n // 3))


def check(spec: ir.Score, layer: Layer, wanted: Array, rtol: float = 3e-5) -> None:
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


# ---- attention ---------------------------------------------------------------------------------------------

ATTENTIONS = [
    ir.Attention(window=8),
    ir.Attention(window=8, rows="sum", pool=MaxPool(width=7)),
    ir.Attention(window=5, rows="max", pool=AveragePool(width=5), pool_at="kv_head", group="max"),
    ir.Attention(window=6, rows="l2", pool=AveragePool(width=3), pool_over="all", group="sum"),
    ir.Attention(window=6, rows="squares", variance=200.0),
    ir.Attention(window=300, softmax="candidates", group="max", group_at="logits"),
    ir.Attention(window=9, causal=False, pool=MaxPool(width=7), pool_at="logits", group_at="logits"),
    ir.Attention(window=9, queries="mean"),
]


@pytest.mark.parametrize("layer", CASES)
@pytest.mark.parametrize("spec", ATTENTIONS, ids=range(len(ATTENTIONS)))
def test_attention(spec: ir.Attention, layer: Layer) -> None:
    check(spec, layer, plain_attention(spec, layer))


@pytest.mark.parametrize("layer", CASES)
def test_last_query(layer: Layer) -> None:
    n, (start, stop) = layer.shape.n, candidates(layer)
    wanted = [
        np.mean([layer.weights(head, n - 1)[start:stop] for head in layer.heads_of(kv_head)], axis=0)
        for kv_head in range(layer.shape.kv_heads)
    ]
    check(ir.LastQuery(), layer, np.stack(wanted))


@pytest.mark.parametrize("layer", CASES)
@pytest.mark.parametrize("group_at", ["products", "factors"])
def test_laprox(group_at: str, layer: Layer) -> None:
    spec = ir.LaProx(window=7, pool=AveragePool(width=5), group_at=group_at)  # type: ignore[arg-type]
    n, (start, stop) = layer.shape.n, candidates(layer)
    wanted = []
    for kv_head in range(layer.shape.kv_heads):
        seen, norms = [], []
        for head in layer.heads_of(kv_head):
            window = layer.matrix(head)[max(0, n - 7) :, start:stop]
            seen.append(pooled(np.sqrt((window**2).sum(axis=0)), spec.pool))
            rows = layer.v[start:stop, kv_head].double() @ layer.w_o[head].double()
            norms.append(rows.norm(dim=-1).numpy())
        products = np.mean(np.multiply(seen, norms), axis=0)
        wanted.append(products if group_at == "products" else np.mean(seen, axis=0) * np.mean(norms, axis=0))
    check(spec, layer, np.stack(wanted) / np.sum(wanted))


def plain_attention(spec: ir.Attention, layer: Layer) -> Array:
    n, (start, stop) = layer.shape.n, candidates(layer)
    window = list(range(max(0, n - spec.window), n))
    queries = window[-1:] if spec.queries == "mean" else window
    wanted = []
    for kv_head in range(layer.shape.kv_heads):
        logits = np.array([[layer.logits(head, q) for q in window] for head in layer.heads_of(kv_head)])
        if spec.queries == "mean":
            k, q = layer.k[:, kv_head].double(), layer.q[window].double().mean(dim=0)
            logits = (q[list(layer.heads_of(kv_head))] @ k.T).numpy()[:, None] * layer.scale
            if layer.shape.logit_cap:
                logits = layer.shape.logit_cap * np.tanh(logits / layer.shape.logit_cap)
        if spec.group_at == "logits":
            logits = joined(logits, spec.group)[None]
        if spec.pool_at == "logits":
            logits[..., start:stop] = pooled(logits[..., start:stop], spec.pool)
        weights = np.zeros_like(logits)
        for g in range(logits.shape[0]):
            for i, query in enumerate(queries):
                seen = [
                    j
                    for j in range(n)
                    if (j <= query or not spec.causal) and (start <= j < stop or spec.softmax == "all")
                ]
                if seen:
                    weights[g, i, seen] = softmax(logits[g, i, seen])
        rows = {
            "mean": weights.mean(axis=1),
            "sum": weights.sum(axis=1),
            "max": weights.max(axis=1),
            "l2": np.sqrt((weights**2).sum(axis=1)),
            "squares": (weights**2).sum(axis=1),
        }[spec.rows]
        if spec.variance and len(queries) > 1:
            rows = rows + spec.variance * weights.var(axis=1, ddof=1)
        rows = rows if spec.pool_over == "all" else rows[..., start:stop]
        if spec.pool_at == "query_head":
            rows = pooled(rows, spec.pool)
        rows = joined(rows, spec.group)
        if spec.pool_at == "kv_head":
            rows = pooled(rows, spec.pool)
        wanted.append(rows[start:stop] if spec.pool_over == "all" else rows)
    return np.stack(wanted)


def joined(x: Array, how: str) -> Array:
    return {"mean": np.mean, "max": np.max, "sum": np.sum}[how](x, axis=0)


def pooled(x: Array, how: AveragePool | MaxPool | None) -> Array:
    if how is None:
        return x
    out, half, n = np.empty_like(x), how.width // 2, x.shape[-1]
    for j in range(n):
        near = x[..., max(0, j - half) : j + half + 1]
        out[..., j] = near.sum(-1) / how.width if isinstance(how, AveragePool) else near.max(-1)
    return out


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


# ---- conventions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", CASES)
def test_the_gram_trick_gives_the_norms(layer: Layer) -> None:
    norms = projected_norms(layer.v, layer.w_o, "l2")
    assert torch.allclose(projected_norms_gram(layer.v, gram(layer.w_o)), norms, rtol=1e-5)
    spec = ir.LaProx(window=7)
    inputs = layer.inputs(spec, candidates(layer))
    by_gram = score(spec, layer.with_gram(inputs))
    cached = score(spec, replace(inputs, w_o=None, projected={"l2": norms}))
    for other in (by_gram, cached):
        assert torch.allclose(other, score(spec, inputs), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("spec", [ir.Attention(window=8), ir.LastQuery(), ir.Rkv()], ids=str)
def test_per_query_scores_average_to_the_score(spec: ir.Score) -> None:
    layer = make(SHAPES[4])
    start, stop = candidates(layer)
    inputs = layer.inputs(spec, (start, stop))
    rows = score_per_query(spec, inputs)
    whole = score(spec, inputs)[:, start:stop]
    if isinstance(spec, ir.Rkv):  # pooling by maximum does not commute with the mean
        assert (rows.mean(dim=1) >= whole - 1e-6).all()
    else:
        assert torch.allclose(rows.mean(dim=1), whole, atol=1e-6)


def test_per_query_scores_of_a_score_without_queries_are_refused() -> None:
    layer = make(SHAPES[1])
    with pytest.raises(ValueError, match="a score per query"):
        score_per_query(ir.KeyNorm(), layer.inputs(ir.KeyNorm(), (0, 17)))


def test_model_precision_rounds_weights() -> None:
    layer = make(SHAPES[4])
    spec = ir.Attention(window=8)
    inputs = layer.inputs(spec, (0, 200))
    low = replace(inputs, k=inputs.k.bfloat16(), q_obs=layer.q.bfloat16())
    rounded, exact = score(spec, low, "model"), score(spec, low)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(rounded, exact)
    assert torch.allclose(rounded, exact, rtol=0.1, atol=1e-3)


def test_no_candidates_and_wrong_candidates() -> None:
    layer = make(SHAPES[1])
    assert (score(ir.Rkv(), layer.inputs(ir.Rkv(), (17, 17))) == -torch.inf).all()
    with pytest.raises(ValueError, match="no run of the 17 rows"):
        score(ir.KeyNorm(), layer.inputs(ir.KeyNorm(), (3, 18)))
