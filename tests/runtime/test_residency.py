"""The residency protocol under random traffic: every row that a query may see is there and is right."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvir.lowering.footprint import peak_pages, resident_pages
from kvir.lowering.pipeline import lower
from kvir.lowering.stages import ExecutionPlan
from kvir.policy_ir.parse import parse
from kvir.sglang_ext import prefix
from kvir.sglang_ext.deltas import TableDeltas
from kvir.sglang_ext.headpages import HeadPagePool
from kvir.sglang_ext.residency import Residency
from support.models import made
from support.prefix_tree import P, Request
from support.simulator import AllRanks, Simulation

IDENTITY = "[{keep: all}]"
UNIFORM = "[{keep: [{sink: 4}, {recent: 40}]}]"
NARROW = (
    "[{keep: [{sink: 4}, {recent: 17}]}, {heads: 0, keep: [{recent: 8}]}, "
    "{layers: 1, keep: [{sink: 20}, {recent: 16}]}]"
)
MIXED = (
    "[{keep: [{sink: 4}, {recent: 64}]}, {layers: 0, keep: all}, {layers: 2, heads: 1, keep: [{recent: 33}]}]"
)
SINKLESS = "[{keep: [{recent: 50}]}]"
PHASED = (
    "[{keep: [{sink: 4}, {recent: 90}]}, {layers: 0, keep: all}, "
    "{phase: decode, keep: [{sink: 4}, {recent: 20}]}, {layers: 2, phase: decode, keep: [{recent: 50}]}]"
)
NARROWING = "[{keep: all}, {phase: decode, keep: [{sink: 4}, {recent: 20}]}]"
SELECTING = (
    "[{keep: [{sink: 4}, {recent: 16}, {top_k: {fraction: 0.25, by: {attention: {window: 16}}}}], "
    "trigger: prefill_end}, {layers: 2, keep: [{recent: 10}, {top_k: {tokens: 20, by: key_norm}}], "
    "trigger: prefill_end}]"
)
SELECTING_AND_SLIDING = (
    SELECTING[:-1] + ", {layers: 0, keep: [{sink: 20}, {recent: 40}]}, {layers: 1, heads: 1, keep: all}]"
)
COMPETING = (
    "[{keep: [{recent: 16}, {top_k: {fraction: 0.2, by: {attention: {window: 16}}, scope: model}}], "
    "trigger: prefill_end}, {layers: 1, keep: [{recent: 4}, {top_k: {tokens: 30, by: key_norm, "
    "scope: layer}}], trigger: prefill_end}, {layers: 2, heads: 1, keep: [{sink: 20}, {recent: 40}]}]"
)
FOLDING = (
    "[{keep: [{recent: 16}, {top_k: {tokens: 24, by: key_norm}}], trigger: {every: 7}}, "
    "{layers: 1, keep: [{recent: 4}, {top_p: {mass: 0.9, by: {attention: {window: 16}}, cap: 60}}], "
    "trigger: [prefill_end, {every: 10}]}, {layers: 2, heads: 1, keep: [{sink: 20}, {recent: 40}]}]"
)
FOLDING_IN_LAYERS = (
    "[{keep: [{recent: 8}, {top_k: {tokens: 20, by: key_norm, scope: layer}}], region: generated, "
    "trigger: {every: 5}}, {layers: 0, keep: [{recent: 4}, {top_k: {tokens: 30, by: key_norm}}], "
    "trigger: [prefill_end, {over: 50}]}]"
)
BLOCKS = (
    "[{keep: [{recent: 16}, {top_k: {tokens: 24, by: key_norm}}], trigger: {prefill_chunk: {tokens: 32}}}, "
    "{layers: 1, keep: {top_k: {fraction: 0.3, by: key_norm}}, "
    "trigger: [{prefill_chunk: {tokens: 48}}, {every: 9}]}, "
    "{layers: 2, heads: 1, keep: [{sink: 4}, {recent: 40}]}]"
)
POLICIES = {
    "blocks": BLOCKS,
    "competing": COMPETING,
    "folding": FOLDING,
    "folding-in-layers": FOLDING_IN_LAYERS,
    "identity": IDENTITY,
    "uniform": UNIFORM,
    "narrow": NARROW,
    "mixed": MIXED,
    "sinkless": SINKLESS,
    "phased": PHASED,
    "selecting": SELECTING,
    "selecting-and-sliding": SELECTING_AND_SLIDING,
    "narrowing": "[{keep: all}, {phase: decode, keep: [{sink: 4}, {recent: 20}]}]",
}


def plan_of(rules: str) -> ExecutionPlan:
    model = made(layers=3, kv_heads=2)
    return lower(parse(f"kvir: 1\nname: test\nrules: {rules}\n"), model, dtype="float32", device="cpu")


def traffic(seed: int, count: int, longest: int, most_new: int) -> list[Request]:
    """Random lengths over a few shared prefixes; some prompts come again, some continue an earlier one."""
    rng = random.Random(seed)
    bases = [[rng.randrange(1000) for _ in range(longest)] for _ in range(3)]
    requests: list[Request] = []
    for i in range(count):
        base = rng.choice(bases)
        tokens = base[: rng.randrange(1, longest)] + [
            rng.randrange(1000) for _ in range(rng.randrange(1, longest // 2))
        ]
        if requests and rng.random() < 0.3:
            tokens = list(rng.choice(requests).tokens) + [
                rng.randrange(1000) for _ in range(rng.randrange(1, 40))
            ]
        requests.append(
            Request(rid=str(i), tokens=tokens[: longest * 2], new_tokens=rng.randrange(1, most_new))
        )
    return requests


@pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])
@pytest.mark.parametrize("chunk", [37, 64, 1000])
@pytest.mark.parametrize("name", POLICIES)
def test_random_traffic_reads_the_right_rows(name: str, chunk: int, overlap: bool) -> None:
    plan = plan_of(POLICIES[name])
    simulation = Simulation(plan, 1024, chunk_tokens=chunk, seed=1)
    simulation.overlap = overlap
    simulation.run(traffic(seed=chunk, count=40, longest=200, most_new=60))
    assert len(simulation.finished) == 40


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", POLICIES)
def test_a_pool_that_is_too_small_retracts_and_reclaims(name: str, seed: int) -> None:
    plan = plan_of(POLICIES[name])
    simulation = Simulation(
        plan, 160 if name in ("uniform", "narrow", "sinkless") else 512, chunk_tokens=64, seed=seed
    )
    simulation.overlap = bool(seed % 2)
    simulation.retract_share, simulation.cancel_share = 0.02, 0.01
    simulation.run(traffic(seed=100 + seed, count=60, longest=150, most_new=40))
    assert len(simulation.finished) == 60


@pytest.mark.parametrize("name", [n for n in POLICIES if n not in ("competing", "folding-in-layers")])
def test_ranks_that_hold_different_heads_keep_the_same_books(name: str) -> None:
    """Two ranks with pools of their own: the one that is short decides for both."""
    plan = plan_of(POLICIES[name])
    simulation = Simulation(
        plan, 160 if name in ("uniform", "narrow", "sinkless") else 512, chunk_tokens=64, ranks=AllRanks(2)
    )
    simulation.overlap = True
    simulation.retract_share, simulation.cancel_share = 0.02, 0.01
    simulation.run(traffic(seed=200, count=60, longest=150, most_new=40))
    assert len(simulation.finished) == 60
    pool = simulation.allocator.residency.pool
    assert pool.free.shape == (2,)
    if name in ("mixed", "narrow", "folding", "selecting-and-sliding"):  # head 1 is not what head 0 is
        assert pool.free[0] != pool.free[1]


@pytest.mark.parametrize("chunk", [40, 64, 1000])
def test_a_prompt_cut_in_blocks_holds_its_budget_and_one_chunk(chunk: int) -> None:
    """64 rows of 640 tokens stay, cut after every 32: rows go at 96 for the first time, so 64 tokens are the
    tree's, and beside them there is only the copy; then the copy and what no block has ended."""
    plan = plan_of("[{keep: {top_k: {tokens: 64, by: key_norm}}, trigger: {prefill_chunk: {tokens: 32}}}]")
    units = plan.layout.unit_count
    simulation = Simulation(plan, 1024, chunk_tokens=chunk, seed=3)
    simulation.run([Request(rid="0", tokens=list(range(640)), new_tokens=2)])
    peak = simulation.allocator.residency.peak_covered
    assert peak <= peak_pages(plan.layout, 642, 640, chunk)
    if chunk % 32 == 0 or chunk > 640:
        assert peak == units * (64 + 64) // P
    assert simulation.allocator.residency.counters["rows_never_written"] > 0
    # the same prompt again finds what the tree holds; its chunks begin elsewhere
    simulation.run([Request(rid="1", tokens=list(range(640)), new_tokens=2)])
    assert simulation.allocator.residency.peak_covered <= peak_pages(plan.layout, 642, 640, chunk)
    assert len(simulation.finished) == 2


def test_three_hundred_requests_conserve_every_page() -> None:
    """Lengths, cancels, shared prefixes, retractions, a tiny pool; every invariant recounted after every
    step.
    """
    simulation = Simulation(plan_of(NARROW), 192, chunk_tokens=48, seed=5)
    simulation.overlap = True
    simulation.retract_share, simulation.cancel_share = 0.01, 0.02
    simulation.run(traffic(seed=9, count=300, longest=180, most_new=50))
    assert len(simulation.finished) == 300
    res = simulation.allocator.residency
    assert res.counters["tombstoned"] > 0
    assert res.counters["healed"] > 0
    assert res.counters["slid_tree"] > 0


def test_a_long_prompt_holds_what_the_planner_says() -> None:
    plan = plan_of(UNIFORM)
    simulation = Simulation(plan, 128, chunk_tokens=64)
    rng = random.Random(0)
    request = Request(rid="long", tokens=[rng.randrange(1000) for _ in range(1200)], new_tokens=40)
    simulation.waiting = [request]
    res = simulation.allocator.residency
    covered: list[int] = []
    while simulation.waiting or simulation.prefilling or simulation.decoding:
        extended = simulation._extend(8)
        assert extended or simulation._decode()
        if res.requests:
            covered.append(int(res.covered_head_pages.sum()))
            assert covered[-1] <= peak_pages(plan.layout, request.done)
            if extended:
                assert covered[-1] == resident_pages(plan.layout, request.done)
            else:
                # a decode step slides to the length before its token, then opens that token's page
                opened = plan.layout.unit_count if request.done % P == 1 else 0
                assert covered[-1] == resident_pages(plan.layout, request.done - 1) + opened
        simulation._process()
        simulation.check()
    assert max(covered) <= peak_pages(plan.layout, 1240) < 128 // P * plan.layout.unit_count


def _never_quarantine(patch: pytest.MonkeyPatch) -> None:
    give = HeadPagePool.give
    patch.setattr(
        HeadPagePool,
        "give",
        lambda self, pages, layers, *, still_read: give(self, pages, layers, still_read=False),
    )


def _forget_epochs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Residency,
        "is_reclaimable",
        lambda self, page, c, *, sinks=False: bool(self.alive[page, c] and not self.cover[page, c]),
    )
    enqueue = Residency._enqueue

    def at_once(self: Residency, pages: object, c: int, *, tail: bool) -> None:
        inside, self._in_extend = self._in_extend, False
        enqueue(self, pages, c, tail=tail)  # type: ignore[arg-type]
        self._in_extend = inside

    patch.setattr(Residency, "_enqueue", at_once)


def _no_shadows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Residency, "note_partial_page", lambda *_args: None)


def _match_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(prefix, "valid_pages", lambda _res, pages: len(pages))


def _remove_at_once(patch: pytest.MonkeyPatch) -> None:
    push = TableDeltas.push
    patch.setattr(TableDeltas, "push", lambda self, pages, rows, *, later=False: push(self, pages, rows))


@pytest.mark.parametrize(
    "bug", [_never_quarantine, _forget_epochs, _no_shadows, _match_anything, _remove_at_once]
)
def test_the_simulation_finds_each_known_bug(bug: Callable[[pytest.MonkeyPatch], None]) -> None:
    """The protocol's rules are all needed: without any one of them some request reads a wrong row."""
    found = False
    with pytest.MonkeyPatch.context() as patch:
        bug(patch)
        for seed in range(6):
            simulation = Simulation(plan_of(NARROW), 96, chunk_tokens=48, seed=seed)
            try:
                simulation.run(traffic(seed=seed, count=60, longest=180, most_new=40), at_once=6)
            except (AssertionError, RuntimeError):
                found = True
                break
    assert found
