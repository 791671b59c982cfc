"""Budgets in rows: worked examples, and equality with the arithmetic of lowering on every amount."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvir.kernels.ref.select_budget import Lengths, group_take, unit_budget
from kvir.lowering import quota
from kvir.lowering.stages import Quota, RampAmount, RowsAmount, ShareAmount, TotalAmount
from kvir.policy_ir import budgets as ir
from kvir.policy_ir.scores import KeyNorm
from kvir.policy_ir.terms import TopK

COUNTS = st.integers(0, 40)


def term(budget: ir.Budget, **more: object) -> TopK:
    return TopK(budget=budget, by=KeyNorm(), **more)  # type: ignore[arg-type]


def test_pyramidkv_as_its_authors_draw_it() -> None:
    """max_capacity 1024, window 32, beta 20, 32 layers, 8,192 tokens: b = 992, low = 49, high = 1935."""
    ramp = term(ir.Ramp(mean=1024))
    lengths = Lengths(n=8192, prompt=8192, inside=32, candidates=8160)
    rows = [unit_budget(ramp, lengths, (layer, 0), (layer, 32)) for layer in range(32)]
    assert rows[:3] == [1935, 1875, 1815]
    assert rows[31] == 1935 - 31 * 60


def test_pyramidkv_of_a_short_sequence() -> None:
    """High is cut to the candidates; below twice the budget every layer gets the same."""
    ramp = term(ir.Ramp(mean=1024))
    rows = [unit_budget(ramp, Lengths(1990, 1990, 32, 1958), (0, 0), (layer, 32)) for layer in (0, 31)]
    assert rows == [1935, 75]
    rows = [unit_budget(ramp, Lengths(1985, 1985, 32, 1920), (0, 0), (layer, 32)) for layer in (0, 31)]
    assert rows == [1920, 1920 - 31 * 59]
    rows = [unit_budget(ramp, Lengths(1983, 1983, 32, 1951), (0, 0), (layer, 32)) for layer in (0, 31)]
    assert rows == [992, 992]


def test_pyramidkv_as_kvpress_draws_it() -> None:
    """768 tokens, half kept, window 64, 30 layers: from 704 down to 64 rows, the window included."""
    ramp = term(ir.Ramp(mean=384, arithmetic="real", rounding="nearest", line="kept"))
    lengths = Lengths(n=768, prompt=768, inside=64, candidates=704)
    kept = [64 + (unit_budget(ramp, lengths, (0, 0), (layer, 30)) or 0) for layer in range(30)]
    assert kept[:4] == [704, 682, 660, 638]
    assert kept[-1] == 64
    assert sum(kept) == 384 * 30
    # a line that would end below the window is flat
    short = Lengths(n=400, prompt=400, inside=64, candidates=336)
    assert unit_budget(ramp, short, (0, 0), (0, 30)) == 320


def test_shares_round_as_they_say() -> None:
    lengths = Lengths(n=101, prompt=50, inside=0, candidates=101)
    shares = {r: term(ir.Fraction(share=0.5, rounding=r)) for r in ("down", "nearest", "up")}  # type: ignore[arg-type]
    rows = {r: unit_budget(t, lengths, (0, 0), (0, 1)) for r, t in shares.items()}
    assert rows == {"down": 50, "nearest": 51, "up": 51}
    assert unit_budget(term(ir.Fraction(share=0.5, of="prompt")), lengths, (0, 0), (0, 1)) == 25
    tenth = term(ir.Fraction(share=0.1, rounding="up"))
    assert unit_budget(tenth, Lengths(70, 70, 0, 70), (0, 0), (0, 1)) == 7  # 0.1 is a tenth, not a bit more


def test_tables() -> None:
    lengths = Lengths(n=100, prompt=100, inside=10, candidates=90)
    assert unit_budget(term(ir.PerLayer(tokens=(40, None))), lengths, (0, 1), (0, 2)) == 30
    assert unit_budget(term(ir.PerLayer(tokens=(40, None))), lengths, (1, 0), (1, 2)) is None
    assert unit_budget(term(ir.PerHead(table=((40, 5),))), lengths, (0, 1), (0, 1)) == -5
    with pytest.raises(ValueError, match="units together"):
        unit_budget(term(ir.Total(tokens=9)), lengths, (0, 0), (0, 1))


def test_safeguards() -> None:
    """Half of 768 rows: kvpress protects int(0.2 * 384) = 76 rows, 64 of them the window."""
    lengths = Lengths(n=768, prompt=768, inside=64, candidates=704)
    half = ir.Fraction(share=0.5)
    take = group_take(term(half, scope="layer", safeguard=ir.Protect(share=0.2)), lengths, [320, 320, 320], 3)
    assert (take.rows, take.safe_rows) == (960, 12)
    take = group_take(term(half, scope="layer", safeguard=ir.Blend(share=0.2)), lengths, [320, 321], 2)
    assert take.blend == (0.2, Fraction(641, 2))
    take = group_take(term(half, scope="layer", floor=500, cap=600), lengths, [320, 320], 2)
    assert (take.rows, take.safe_rows, take.cap_rows) == (1000, 500, 600)


@given(
    budget=st.one_of(
        st.builds(ir.FixedTokens, tokens=st.integers(1, 60)),
        st.builds(
            ir.Fraction,
            share=st.floats(0.01, 1),
            of=st.sampled_from(["sequence", "prompt"]),
            rounding=st.sampled_from(["down", "nearest", "up"]),
        ),
        st.builds(ir.Total, tokens=st.integers(1, 150)),
        st.builds(
            ir.Ramp,
            mean=st.integers(1, 60),
            ratio=st.integers(1, 25),
            arithmetic=st.sampled_from(["integer", "real"]),
            rounding=st.sampled_from(["down", "nearest", "up"]),
            line=st.sampled_from(["selected", "kept"]),
        ),
    ),
    group=st.integers(1, 5),
    n=st.integers(0, 120),
    generated=COUNTS,
    inside=COUNTS,
    kept=st.booleans(),
    floor=COUNTS,
    cap=st.none() | st.integers(40, 80),
    index=st.integers(0, 6),
)
def test_rows_equal_those_of_lowering(
    budget: ir.Budget,
    group: int,
    n: int,
    generated: int,
    inside: int,
    kept: bool,
    floor: int,
    cap: int | None,
    index: int,
) -> None:
    candidates, prompt = max(0, n - inside), max(0, n - generated)
    lengths = Lengths(n, prompt, inside if kept else 0, candidates)
    top = term(budget, scope="layer" if group > 1 else "head", floor=floor, cap=cap)
    budgets = [] if isinstance(budget, ir.Total) else [unit_budget(top, lengths, (0, 0), (index, 7)) or 0]
    take = group_take(top, lengths, budgets * group, group)
    planned = Quota(
        by="key_norm",
        amount=amount(budget, index),
        inside=lengths.inside,
        scope=top.scope,
        group=group,
        floor=0 if group == 1 else floor,
        cap=None if group == 1 else cap,
    )
    assert quota.group_rows(planned, candidates, n, prompt) == (take.rows, take.rows)


def amount(budget: ir.Budget, index: int) -> RowsAmount | ShareAmount | TotalAmount | RampAmount:
    """What lowering makes of a budget, layer `index` of 7."""
    match budget:
        case ir.FixedTokens(tokens=tokens):
            return RowsAmount(rows=tokens)
        case ir.Fraction(share=share, of=of, rounding=rounding):
            return ShareAmount(share=share, of=of, rounding=rounding)
        case ir.Total(tokens=tokens):
            return TotalAmount(rows=tokens)
        case ir.Ramp(mean=mean, ratio=ratio, arithmetic=arithmetic, rounding=rounding, line=line):
            return RampAmount(
                mean=mean,
                ratio=ratio,
                arithmetic=arithmetic,
                rounding=rounding,
                line=line,
                index=index,
                count=7,
            )
        case _:
            raise AssertionError(budget)
