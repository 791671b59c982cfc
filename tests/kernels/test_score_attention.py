"""Scores by attention of observed queries equal their formulas, written out in float64 with loops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvir.kernels.ref.score import score, score_per_query
from kvir.kernels.ref.score_values import gram, projected_norms, projected_norms_gram
from kvir.policy_ir import scores as ir
from kvir.policy_ir.pools import AveragePool, MaxPool
from support.score_cases import SHAPES, Array, Layer, candidates, check, make, pooled, softmax

CASES = [pytest.param(make(shape), id=str(shape)) for shape in SHAPES]

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
