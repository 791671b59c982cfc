"""Merged rows against loops in float64, and against the exact attention."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from kvir.kernels.ref.merge import merge_rows
from kvir.policy_ir.rules import Merge

ROWS, SIZE, GROUP, SCALE = 40, 16, 3, 0.25
KEPT = torch.tensor([0, 1, 5, 9, 14, 20, 21, 30, 36, 37, 38, 39])
INTO = KEPT[2:9]  # the first are sinks, the last are recent
INTOS: tuple[Literal["pairwise", "one", "neighbour"], ...] = ("pairwise", "one", "neighbour")


def inputs(
    queries: int, seed: int = 0, spread: int = 1
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(ROWS, SIZE, generator=generator) for _ in range(2))
    q = torch.randn(queries, GROUP, SIZE, generator=generator) * 2
    bias = torch.randn(ROWS, generator=generator)
    positions = torch.arange(ROWS) * spread  # if 2, some rows come after some queries
    return k, v, bias, positions, q, torch.arange(80 - queries, 80)


def merged(
    spec: Merge, queries: int, seed: int = 0, group: int = GROUP, cap: float = 0.0, spread: int = 1
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor, Tensor]]:
    k, v, bias, positions, q, at = inputs(queries, seed, spread)
    given = (k, v, bias, positions, q[:, :group], at)
    out = merge_rows(spec, k, v, bias, positions, KEPT, INTO, q[:, :group], at, SCALE, cap)
    return given, out


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, cap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Output [R, G, D] and log-sum-exp [R, G], every row in sight."""
    logits = q @ k.T * SCALE
    logits = (cap * torch.tanh(logits / cap) if cap else logits) + bias
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize("cap", [0.0, 5.0])
@pytest.mark.parametrize("keys", ["average", "keep"])
@pytest.mark.parametrize("into", INTOS)
def test_one_reference_query_sees_what_it_saw(
    into: Literal["pairwise", "one", "neighbour"], keys: Literal["average", "keep"], cap: float
) -> None:
    (k, v, bias, _, q, _), rows = merged(Merge(into=into, keys=keys), 1, group=1, cap=cap)
    exact, lse = attend(q, k, v, bias, cap)
    found, same = attend(q, *rows, cap)
    assert (found - exact).abs().max() < 1e-5
    assert (same - lse).abs().max() < 1e-5


@pytest.mark.parametrize("into", INTOS)
def test_several_queries_give_the_rows_the_attention_that_they_gave(
    into: Literal["pairwise", "one", "neighbour"],
) -> None:
    """In sum over the reference, relative to the log-sum-exp that it had."""
    (k, v, bias, _, q, _), rows = merged(Merge(into=into), 6)
    _, lse = attend(q, k, v, bias)
    weights = torch.exp(q @ rows[0].T * SCALE + rows[2] - lse[..., None])
    assert abs(float(weights.sum()) - 6 * GROUP) < 1e-3


def test_without_a_bias_attention_is_lost() -> None:
    """By Jensen's inequality."""
    (k, v, bias, _, q, _), rows = merged(Merge(bias="none"), 1, group=1)
    assert torch.equal(rows[2], bias[KEPT])
    assert (attend(q, *rows)[1] < attend(q, k, v, bias)[1]).all()


def test_rows_that_nothing_joins_are_untouched() -> None:
    given, rows = merged(Merge(into="one"), 4)
    changed = [
        not torch.equal(a[KEPT][i], b[i]) for a, b in zip(given, rows, strict=False) for i in range(12)
    ]
    of_k, of_v, of_bias = changed[:12], changed[12:24], changed[24:]
    assert of_k == of_v == of_bias
    assert sum(of_k) == 1
    assert KEPT[of_k.index(True)] in INTO


def test_nothing_goes_or_nothing_takes() -> None:
    k, v, bias, positions, q, at = inputs(4)
    every = torch.arange(ROWS)
    same = merge_rows(Merge(), k, v, bias, positions, every, INTO, q, at, SCALE, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(same, (k, v, bias), strict=True))
    none = merge_rows(Merge(), k, v, bias, positions, KEPT, INTO[:0], q, at, SCALE, 0.0)
    assert all(torch.equal(a, b[KEPT]) for a, b in zip(none, (k, v, bias), strict=True))


@pytest.mark.parametrize("weights", ["attention", "equal"])
@pytest.mark.parametrize("keys", ["average", "keep"])
@pytest.mark.parametrize("into", INTOS)
@pytest.mark.parametrize("queries", [1, 5])
def test_equals_loops(
    into: Literal["pairwise", "one", "neighbour"],
    keys: Literal["average", "keep"],
    weights: Literal["attention", "equal"],
    queries: int,
) -> None:
    spec = Merge(into=into, keys=keys, weights=weights)
    given, rows = merged(spec, queries, seed=queries, spread=2)
    wanted = by_loops(spec, *[x.double() if x.is_floating_point() else x for x in given])
    for name, a, b in zip("kvb", rows, wanted, strict=True):
        assert (a.double() - b).abs().max() < 1e-4, name


def by_loops(
    spec: Merge, k: Tensor, v: Tensor, bias: Tensor, positions: Tensor, q: Tensor, at: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, row by row."""
    stay, into = KEPT.tolist(), INTO.tolist()
    seen = [(r, g) for r in range(q.shape[0]) for g in range(q.shape[1])]

    def logit(r: int, g: int, key: Tensor) -> float:
        return float(q[r, g] @ key) * SCALE

    def visible(r: int, j: int) -> bool:
        return int(positions[j]) <= int(at[r])

    lse = {
        (r, g): math.log(sum(math.exp(logit(r, g, k[j]) + bias[j]) for j in range(ROWS) if visible(r, j)))
        for r, g in seen
    }
    mass = [
        sum(math.exp(logit(r, g, k[j]) + float(bias[j]) - lse[r, g]) for r, g in seen if visible(r, j))
        for j in range(ROWS)
    ]
    losers = [j for j in range(ROWS) if j not in stay]
    worst = sorted(into, key=lambda j: mass[j])
    target: dict[int, int]
    match spec.into:
        case "one":
            target = {j: worst[0] for j in losers}
        case "neighbour":
            target = {j: min((i for i in into if i > j), default=into[-1]) for j in losers}
        case "pairwise":
            takers = sorted(worst[: len(losers)])
            target = {j: takers[i * len(takers) // len(losers)] for i, j in enumerate(losers)}
    k2, v2, b2 = k.clone(), v.clone(), bias.clone()
    for i in set(target.values()):
        group = [i, *(j for j in losers if target[j] == i)]
        total = sum(mass[j] for j in group)
        part = {j: 1 / len(group) if spec.weights == "equal" else mass[j] / total for j in group}
        v2[i] = sum(part[j] * v[j] for j in group)
        if spec.keys == "average":
            k2[i] = sum(part[j] * k[j] for j in group)
        got = sum(math.exp(logit(r, g, k2[i]) - lse[r, g]) for r, g in seen if visible(r, i))
        b2[i] = math.log(total) - math.log(got)
    return k2[stay], v2[stay], b2[stay]
