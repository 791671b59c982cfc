"""What a score needs is what it reads: with it the score can be computed, without any of it it cannot."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvir.kernels.ref.score import score
from kvir.kernels.ref.score_needs import needs, observed_queries, running, skips, term_scores, window
from kvir.kernels.score_ops import ScoreInputs
from kvir.policy_ir import load
from kvir.policy_ir import scores as ir
from support.score_cases import SHAPES, make

ROOT = Path(__file__).parents[2]
FIELDS = {
    "q_obs": "q_obs",
    "running": "running",
    "query_moments": "moments",
    "projected_l1": "w_o",
    "projected_l2": "w_o",
    "rope": "rope",
    "budget_rows": "budget_rows",
}
EMPTY: dict[str, Any] = {"running": {}, "moments": {}}
ATTENTION = ir.Attention(window=8)
# score, needs, last queries that must be computed
TABLE: list[tuple[ir.Score, set[str], int | None]] = [
    (ATTENTION, {"q_obs"}, 8),
    (ir.LastQuery(), {"q_obs"}, 1),
    (ir.Accumulated(), {"running"}, None),
    (ir.Persistent(history=11), {"running"}, 11),
    (ir.Persistent(history=None), {"running"}, None),
    (ir.ExpectedAttention(future=20), {"query_moments", "rope"}, None),
    (ir.Noncausal(), {"running"}, None),
    (ir.KeyNorm(), set(), 0),
    (ir.KeyDiff(), set(), 0),
    (ir.KeyDiff(rotated=False), {"rope"}, 0),
    (ir.LagKV(lag=4), set(), 0),
    (ir.Cur(), set(), 0),
    (ir.Leverage(dims=2), {"rope"}, 0),
    (ir.ValueLeverage(future=20), {"query_moments", "rope"}, None),
    (ir.Redundancy(), set(), 0),
    (ir.Random(), set(), 0),
    (ir.Rkv(), {"q_obs"}, 8),
    (ir.LaProx(), {"q_obs", "projected_l2"}, 32),
    (ir.CriticalKV(base=ATTENTION), {"q_obs", "projected_l1", "budget_rows"}, 8),
    (ir.CriticalKV(base=ir.KeyNorm(), norm="l2"), {"projected_l2", "budget_rows"}, 0),
    (ir.ValueWeighted(base=ir.Accumulated()), {"running"}, None),
    (ir.ValueWeighted(base=ATTENTION, projected=True), {"q_obs", "projected_l1"}, 8),
    (ir.Sum(parts=(ir.Part(score=ir.Leverage(dims=2)), ir.Part(score=ATTENTION))), {"rope", "q_obs"}, 8),
]


def test_every_score_of_the_language_is_in_the_table() -> None:
    assert {type(spec) for spec, _, _ in TABLE} == set(ir.Score.__args__)


@pytest.mark.parametrize(("spec", "wanted", "queries"), TABLE, ids=[str(s)[:60] for s, _, _ in TABLE])
def test_needs(spec: ir.Score, wanted: set[str], queries: int | None) -> None:
    assert needs(spec) == wanted
    assert observed_queries(spec) == queries
    layer = make(SHAPES[1])
    whole = layer.inputs(spec, (1, 14))
    optional = {f.name for f in fields(ScoreInputs)} & set(FIELDS.values())
    unused = {name: EMPTY.get(name) for name in optional - {FIELDS[need] for need in wanted}}
    least = replace(whole, **unused)
    if window(spec):
        least = replace(least, q_obs=layer.q[-window(spec) :])
    assert torch.equal(score(spec, least), score(spec, whole))
    for need in wanted:
        name = FIELDS[need]
        with pytest.raises(ValueError, match=r"missing|needed"):
            score(spec, replace(least, **{name: EMPTY.get(name)}))


def test_statistics_are_named_once() -> None:
    base = ir.Accumulated(decay=0.5)
    spec = ir.Sum(parts=(ir.Part(score=base), ir.Part(score=ir.ValueWeighted(base=base))))
    assert running(spec) == (base,)
    assert skips(ir.ExpectedAttention(skip=7)) == (7,)
    assert skips(ir.ValueLeverage()) == (4,)


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "methods").glob("*.ir")), ids=lambda p: p.stem)
def test_needs_of_every_example_are_known(path: Path) -> None:
    terms = [term for rule in load(path).rules for term in rule.keep]
    scores = [spec for term in terms for spec in term_scores(term)]
    assert all(needs(spec) <= set(FIELDS) for spec in scores)
    # what reads queries says how many
    for spec in scores:
        reads = needs(spec) & {"q_obs", "running", "query_moments"}
        assert bool(reads) == (observed_queries(spec) != 0)
        assert window(spec) <= (observed_queries(spec) or window(spec))
