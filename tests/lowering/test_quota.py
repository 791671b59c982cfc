"""Rows that lowering counts are the rows that the reference keeps, for every budget, scope and safeguard."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvir.kernels.ref.select_offer import LayerState
from kvir.kernels.ref.select_rule import select_rule
from kvir.kernels.score_ops import ScoreInputs
from kvir.lowering.pipeline import lower_to
from kvir.lowering.quota import first_run, kept_rows, kept_rows_of_all
from kvir.lowering.stages import LayoutPlan, Selection
from kvir.lowering.verify import verified_errors
from kvir.policy_ir import Policy
from kvir.policy_ir.budgets import (
    Blend,
    FixedTokens,
    Fraction,
    PerHead,
    PerLayer,
    Preference,
    Protect,
    Ramp,
    Total,
)
from kvir.policy_ir.nodes import Recent, Rule, Sink, Term, TopK, TopP
from kvir.policy_ir.scores import Attention, Random
from support.models import made

LAYERS, HEADS, DIM = 3, 2, 4
SCORES = Random(seed=5)
ROWS = st.integers(0, 60)
BUDGETS = st.one_of(
    st.builds(FixedTokens, tokens=st.integers(1, 60)),
    st.builds(
        Fraction,
        share=st.sampled_from([0.1, 0.25, 0.3, 0.7]),
        rounding=st.sampled_from(["down", "nearest", "up"]),
    ),
    st.builds(Total, tokens=st.integers(1, 300)),
    st.builds(PerLayer, tokens=st.tuples(*[st.none() | ROWS] * LAYERS)),
    st.builds(PerHead, table=st.tuples(*[st.tuples(*[st.none() | ROWS] * HEADS)] * LAYERS)),
    st.builds(
        Ramp,
        mean=st.integers(1, 60),
        ratio=st.integers(1, 20),
        arithmetic=st.sampled_from(["integer", "real"]),
        line=st.sampled_from(["selected", "kept"]),
    ),
    st.builds(Preference, mean=st.integers(1, 60), window=st.just(4)),
)


@st.composite
def top_ks(draw: st.DrawFn) -> TopK:
    low = draw(st.integers(0, 20))
    return TopK(
        budget=draw(BUDGETS),
        by=SCORES,
        scope=draw(st.sampled_from(["head", "layer", "model"])),
        counts=draw(st.sampled_from(["selected", "kept"])),
        floor=low,
        cap=draw(st.none() | st.integers(low + 1, 80)),
        safeguard=draw(
            st.none()
            | st.builds(Blend, share=st.sampled_from([0.2, 0.5]))
            | st.builds(Protect, share=st.sampled_from([0.2, 0.5]))
        ),
        tie=draw(st.sampled_from([None, None, "layer"])),
        block=draw(st.sampled_from([1, 1, 7])),
    )


TOP_PS = st.builds(
    lambda mass, low, more: TopP(mass=mass, by=SCORES, of=Attention(window=4), floor=low, cap=low + more),
    st.sampled_from([0.1, 0.5, 0.9]),
    st.integers(0, 20),
    st.integers(1, 60),
)


def budgeted(rule: Rule) -> LayoutPlan:
    policy = Policy(kvir=1, name="p", rules=(rule,))
    assume(not verified_errors(policy))
    layout = lower_to("layout", policy, made(LAYERS, HEADS, head_dim=DIM), dtype="float32")
    assert isinstance(layout, LayoutPlan)
    return layout


def kept_by_reference(rule: Rule, n: int, seed: int) -> dict[tuple[int, int], int]:
    """How many rows stay in each (layer, head) when every row is there."""
    chance = torch.Generator().manual_seed(seed)
    layers = [
        LayerState(
            ScoreInputs(
                k=torch.randn(n, HEADS, DIM, generator=chance),
                v=torch.randn(n, HEADS, DIM, generator=chance),
                candidates=(0, n),
                scale=0.5,
                layer=layer,
                q_obs=torch.randn(min(4, n), HEADS, DIM, generator=chance),
            ),
            tuple(range(HEADS)),
        )
        for layer in range(LAYERS)
    ]
    return {unit: len(rows) for unit, rows in select_rule(rule, layers, n).items()}


def check(rule: Rule, n: int, seed: int) -> None:
    layout = budgeted(rule)
    kept = kept_by_reference(rule, n, seed)
    for (layer, head), rows in kept.items():
        selection = layout.budgeted.prefill[layer][head].selection
        if selection is None:
            assert rows == n
            continue
        bounds = kept_rows(first_run(selection, n, n))
        assert bounds.least <= rows <= bounds.most, (layer, head, rows, bounds)
        if is_exact(selection):
            assert bounds.exact
    for c in layout.compact:
        selection = c.prefill.selection
        assert selection is not None
        groups = [group_count(q.scope, c.units) for q in selection.quotas]
        rows = sum(kept[divmod(unit, HEADS)] for unit in c.units)
        every = kept_rows_of_all(first_run(selection, n, n), len(c.units), groups)
        assert every.least <= rows <= every.most, (c.units, rows, every)


def group_count(scope: str, units: tuple[int, ...]) -> int:
    return {"head": len(units), "layer": len({u // HEADS for u in units}), "model": 1}[scope]


def is_exact(selection: Selection) -> bool:
    """Whether counts depend on the length alone."""
    return len(selection.quotas) == 1 and all(
        q.group == 1 and q.block == 1 and q.amount.__struct_config__.tag not in ("mass", "open")
        for q in selection.quotas
    )


@st.composite
def rules(draw: st.DrawFn, *terms: st.SearchStrategy[Term]) -> Rule:
    keep: list[Term] = []
    if sink := draw(st.integers(0, 6)):
        keep.append(Sink(tokens=sink))
    if recent := draw(st.sampled_from([0, 3, 15, 20, 33])):
        keep.append(Recent(tokens=recent))
    return Rule(keep=(*keep, *[draw(term) for term in terms]))


quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@given(rules(top_ks()), st.integers(1, 130), st.integers(0, 99))
def test_one_budget(rule: Rule, n: int, seed: int) -> None:
    check(rule, n, seed)


@quick
@given(rules(TOP_PS), st.integers(1, 130), st.integers(0, 99))
def test_a_nucleus(rule: Rule, n: int, seed: int) -> None:
    check(rule, n, seed)


@quick
@given(rules(top_ks().filter(lambda t: t.counts == "selected"), TOP_PS), st.integers(1, 130))
def test_two_terms(rule: Rule, n: int) -> None:
    check(rule, n, 3)
