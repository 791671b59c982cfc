"""Pages of units that select: the bounds hold for every choice of rows, and are exact where budgets are."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvir.lowering import footprint
from kvir.lowering.pipeline import lower
from kvir.lowering.tensor_parallel import rank_layout
from kvir.lowering.verify import verified_errors
from kvir.policy_ir import Policy, load
from kvir.policy_ir.budgets import Blend, FixedTokens, Fraction, PerHead, Protect, Total
from kvir.policy_ir.nodes import Recent, Rule, Sink, Term, TopK, TopP
from kvir.policy_ir.rules import Every, Over, PrefillChunk, PrefillEnd
from kvir.policy_ir.scores import Attention, KeyNorm
from support.models import config_model, made
from support.selecting import Request

METHODS = Path(__file__).parents[2] / "examples/methods"
LAYERS, HEADS = 2, 3
KEY_NORM = KeyNorm()

BUDGETS = st.one_of(
    st.builds(FixedTokens, tokens=st.integers(1, 60)),
    st.builds(
        Fraction,
        share=st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.9]),
        of=st.sampled_from(["sequence", "prompt"]),
        rounding=st.sampled_from(["down", "nearest", "up"]),
    ),
    st.builds(Total, tokens=st.integers(1, 300)),
    st.builds(
        lambda rows: PerHead(table=tuple(map(tuple, rows))),
        st.lists(
            st.lists(st.integers(0, 60), min_size=HEADS, max_size=HEADS), min_size=LAYERS, max_size=LAYERS
        ),
    ),
)


@st.composite
def top_ks(draw: st.DrawFn) -> TopK:
    low = draw(st.integers(0, 20))
    return TopK(
        budget=draw(BUDGETS),
        by=KEY_NORM,
        scope=draw(st.sampled_from(["head", "layer", "model"])),
        counts=draw(st.sampled_from(["selected", "kept"])),
        floor=low,
        cap=draw(st.none() | st.integers(low + 1, 80)),
        safeguard=draw(
            st.none()
            | st.builds(Blend, share=st.sampled_from([0.2, 0.5]))
            | st.builds(Protect, share=st.sampled_from([0.2, 0.5]))
        ),
    )


TOP_PS = st.builds(
    lambda low, more: TopP(mass=0.9, by=KEY_NORM, of=Attention(), floor=low, cap=low + more),
    st.integers(0, 30),
    st.integers(1, 30),
)
PREFILL = st.sampled_from(
    [(), (PrefillEnd(),), (PrefillEnd(over=50),), (PrefillChunk(),), (PrefillChunk(tokens=24),)]
)
DECODE = st.sampled_from([(), (), (Every(tokens=1),), (Every(tokens=20),), (Over(tokens=40),)])


@st.composite
def rules(draw: st.DrawFn, *terms: st.SearchStrategy[Term]) -> Rule:
    keep: list[Term] = []
    if sink := draw(st.integers(0, 6)):
        keep.append(Sink(tokens=sink))
    if recent := draw(st.sampled_from([0, 3, 15, 20, 33])):
        keep.append(Recent(tokens=recent))
    keep += [draw(term) for term in terms]
    trigger = (*draw(PREFILL), *draw(DECODE))
    return Rule(
        keep=tuple(keep), trigger=trigger, region=draw(st.sampled_from(["all", "all", "prompt", "generated"]))
    )


def folds() -> st.SearchStrategy[Rule]:
    """Rules that select in decode alone."""
    when = st.sampled_from([(Every(tokens=1),), (Every(tokens=20),), (Over(tokens=40),)])
    return st.builds(lambda rule, trigger: replace(rule, trigger=trigger), rules(top_ks()), when)


def check(
    rule: Rule, prompt: int, new: int, seed: int, *, before: tuple[Rule, ...] = (), chunk: int = 32
) -> None:
    """The course of one request against the arithmetic, at every length.

    The rules `before` come first in the policy.
    """
    policy = Policy(kvir=1, name="p", rules=(*before, rule))
    assume(not verified_errors(policy))
    layout = lower(policy, made(LAYERS, HEADS), dtype="bfloat16").layout
    request = Request(layout, prompt, chunk, seed)
    for _ in range(new + 1):
        held = footprint.done_pages(layout, request.n, prompt)
        assert held.least <= request.pages <= held.most, (request.n, request.pages, held)
        assert request.peak <= footprint.peak_pages(layout, request.n, prompt, chunk)
        if is_exact(rule) and not before:
            assert held.exact
        request.step()


def is_exact(rule: Rule) -> bool:
    """Whether counts depend on lengths alone."""
    alone = all(t.scope == "head" for t in rule.keep if isinstance(t, TopK))
    one = sum(isinstance(t, TopK) for t in rule.keep) == 1 and not any(isinstance(t, TopP) for t in rule.keep)
    return alone and one and rule.region == "all" and not any(isinstance(t, Over) for t in rule.trigger)


lengths = given(rules(top_ks()), st.integers(1, 130), st.integers(0, 70), st.integers(0, 99))
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@quick
@lengths
def test_one_budget(rule: Rule, prompt: int, new: int, seed: int) -> None:
    check(rule, prompt, new, seed)


@quick
@given(rules(TOP_PS), st.integers(1, 130), st.integers(0, 70), st.integers(0, 99))
def test_a_nucleus(rule: Rule, prompt: int, new: int, seed: int) -> None:
    check(rule, prompt, new, seed)


@quick
@given(
    rules(top_ks().filter(lambda t: t.counts == "selected"), TOP_PS), st.integers(1, 130), st.integers(0, 70)
)
def test_two_terms(rule: Rule, prompt: int, new: int) -> None:
    check(rule, prompt, new, 7)


# rivals with unequal numbers of candidates, fewer than the budget: a blend takes from who has more
BLENDED = Rule(
    keep=(
        Recent(tokens=3),
        TopK(budget=FixedTokens(tokens=27), by=KEY_NORM, scope="layer", safeguard=Blend(share=0.5)),
    ),
    trigger=(Every(tokens=1),),
)
CUT_IN_CHUNKS = Rule(
    keep=(TopK(budget=FixedTokens(tokens=1), by=KEY_NORM, scope="layer", floor=13),),
    trigger=(PrefillChunk(tokens=None),),
)


@quick
@given(rules(top_ks()), folds(), st.integers(1, 130), st.integers(0, 70), st.integers(0, 99))
@example(CUT_IN_CHUNKS, BLENDED, 38, 4, 2)
def test_a_rule_per_phase(first: Rule, second: Rule, prompt: int, new: int, seed: int) -> None:
    check(replace(second, phase="decode"), prompt, new, seed, before=(first,))


@quick
@given(
    st.integers(0, 20),
    st.integers(1, 60),
    folds(),
    st.integers(1, 130),
    st.integers(0, 70),
)
def test_windows_in_prefill(sink: int, recent: int, rule: Rule, prompt: int, new: int) -> None:
    keep = (Sink(tokens=sink), Recent(tokens=recent)) if sink else (Recent(tokens=recent),)
    check(replace(rule, phase="decode"), prompt, new, 3, before=(Rule(keep=keep),))


# ---- by hand -----------------------------------------------------------------------------------------------


def test_snapkv_on_a_prompt_of_650_tokens() -> None:
    """A quarter of 650 rows is 162; 10 of them lie in the page that stays, so 152 go to 10 pages."""
    rule = Rule(
        keep=(Recent(tokens=32), TopK(budget=Fraction(share=0.25), by=Attention(), counts="kept")),
        trigger=(PrefillEnd(),),
    )
    model = made(30, 3, group=3, head_dim=64)
    layout = lower(Policy(kvir=1, name="p", rules=(rule,)), model, dtype="float32").layout
    assert footprint.resident_pages(layout, 650) == 90 * 41
    assert footprint.peak_pages(layout, 650) == 90 * (41 + 10)
    assert footprint.done_pages(layout, 650) == (990, 990)
    # 22 tokens later the dense tier has 3 pages
    assert footprint.done_pages(layout, 672, 650) == (90 * 12, 90 * 12)
    # shorter than what it would keep: nothing happens
    assert footprint.peak_pages(layout, 30) == footprint.done_pages(layout, 30).most == 90 * 2


def test_peak_of_blocks_is_the_budget_and_what_came_before_the_first_drop() -> None:
    rule = Rule(
        keep=(TopK(budget=FixedTokens(tokens=256), by=KEY_NORM),), trigger=(PrefillChunk(tokens=128),)
    )
    layout = lower(Policy(kvir=1, name="p", rules=(rule,)), made(2, 2), dtype="bfloat16").layout
    # rows go at 384 tokens: at most 383 came in earlier chunks, and 127 of this one no block has ended
    for chunk_tokens in (128, 8192):
        peak = footprint.peak_pages(layout, 100_000, chunk_tokens=chunk_tokens)
        assert peak == 4 * (256 // 16 + 384 // 16 + 128 // 16)
    assert footprint.peak_pages(layout, 100_000, chunk_tokens=32) == 4 * (256 // 16 + 384 // 16 + 32 // 16)
    assert footprint.done_pages(layout, 100_000) == (4 * 16, 4 * 16)
    # the server's own chunks
    served = replace(rule, trigger=(PrefillChunk(),))
    layout = lower(Policy(kvir=1, name="p", rules=(served,)), made(2, 2), dtype="bfloat16").layout
    assert footprint.peak_pages(layout, 100_000, chunk_tokens=2048) == 4 * (256 + 2048) // 16


def test_rivals_have_a_total_and_each_its_bounds() -> None:
    """8 units with 100 rows each on average: 800 rows take 50 pages and at most 15 rows of waste per unit."""
    rule = Rule(keep=(TopK(budget=FixedTokens(tokens=100), by=KEY_NORM, scope="model"),))
    layout = lower(Policy(kvir=1, name="p", rules=(rule,)), made(4, 2), dtype="bfloat16").layout
    assert footprint.done_pages(layout, 1600) == (50, (800 + 8 * 15) // 16)


def test_what_fits_while_one_prompt_is_read_and_the_others_decode() -> None:
    layout = lower(load(METHODS / "snapkv.ir"), config_model("llama-3.1-8b"), dtype="bfloat16").layout
    memory = 20 << 30
    pool = footprint.pool_size(layout, memory).head_pages
    peak, done = footprint.peak_pages(layout, 32_768), footprint.done_pages(layout, 32_768).most
    assert (peak, done) == (256 * (2048 + 64), 256 * 64)
    assert footprint.concurrency(layout, 32_768, memory) == pool // peak == 4
    assert footprint.decoding(layout, 32_768, memory) == (pool - peak) // done + 1 == 123
    assert footprint.decoding(layout, 32_768, 3 << 30) == 0


def test_ranks_that_share_a_group_may_each_get_all_of_it() -> None:
    layout = lower(load(METHODS / "laprox.ir"), config_model("llama-3.1-8b"), dtype="bfloat16").layout
    ranks = [rank_layout(layout, 8, rank) for rank in range(8)]
    whole = footprint.done_pages(layout, 32_768)
    assert all(footprint.done_pages(rank, 32_768).most > whole.most // 8 for rank in ranks)
    assert all(footprint.done_pages(rank, 32_768).most <= whole.most for rank in ranks)
    heads = lower(load(METHODS / "snapkv.ir"), config_model("llama-3.1-8b"), dtype="bfloat16").layout
    parts = [footprint.done_pages(rank_layout(heads, 8, rank), 32_768).most for rank in range(8)]
    assert sum(parts) == footprint.done_pages(heads, 32_768).most
