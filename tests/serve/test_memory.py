"""A pool of 1,024 full-KV tokens under sinks and a window of 128: what stock SGLang cannot admit is served,
six at once, within the planner's numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from evaluation.oracle import Oracle, check
from evaluation.traffic import Traffic
from evaluation.watch import Watch
from kvir.lowering import footprint
from kvir.lowering.stages import ExecutionPlan
from support.evidence import assert_healthy, wait_idle
from support.fleet import Fleet

PROMPT_TOKENS, NEW_TOKENS = 6000, 200
AT_ONCE = 6

tight = pytest.mark.parametrize("server", ["tight"], indirect=True)


@pytest.fixture
def plan(plan_of: Callable[[str], ExecutionPlan]) -> ExecutionPlan:
    return plan_of("tight")


def test_the_planner_expects_this(plan: ExecutionPlan) -> None:
    layout = plan.layout
    pool = 1024 // layout.page_tokens * layout.unit_count
    assert footprint.peak_pages(layout, PROMPT_TOKENS + NEW_TOKENS) * AT_ONCE <= pool
    assert footprint.full_pages(layout, PROMPT_TOKENS) > pool


@tight
def test_a_prompt_longer_than_the_pool(traffic: Traffic, oracle: Oracle, plan: ExecutionPlan) -> None:
    layout = plan.layout
    peak = footprint.peak_pages(layout, PROMPT_TOKENS + NEW_TOKENS)
    with Watch(traffic.server) as watch:
        answer = traffic.one_by_one([traffic.cut(100, PROMPT_TOKENS)], NEW_TOKENS)[0]
    agreement = check(oracle, [answer])
    assert agreement.ok, str(agreement)
    held: dict[int, set[int]] = {}
    for state in watch.seen:
        for request in state["running"]:
            assert sum(request["by_unit"]) == request["head_pages_held"]
            held.setdefault(request["pages"], set()).add(request["head_pages_held"])
    assert all(count <= peak for counts in held.values() for count in counts)
    steady = [counts for pages, counts in held.items() if pages > PROMPT_TOKENS // layout.page_tokens]
    # decode holds one more page than the resident number while the token in it is being computed
    assert steady
    resident = footprint.resident_pages(layout, PROMPT_TOKENS // layout.page_tokens * layout.page_tokens)
    assert set.union(*steady) == {resident + layout.unit_count} == {peak}
    state = wait_idle(traffic.server)
    assert state["head_pages"]["peak_covered"] == peak
    end = state["finished"][-1]
    assert end["head_pages_full"] == footprint.full_pages(layout, PROMPT_TOKENS + NEW_TOKENS - 1)
    assert end["head_pages_held"] == peak < end["head_pages_full"] / 30


@tight
def test_six_such_prompts_at_once(traffic: Traffic, oracle: Oracle, plan: ExecutionPlan) -> None:
    prompts = [traffic.cut(6000 * i, PROMPT_TOKENS + i) for i in range(AT_ONCE)]
    answers = traffic.ask(prompts, NEW_TOKENS, concurrency=AT_ONCE)
    peak = footprint.peak_pages(plan.layout, PROMPT_TOKENS + NEW_TOKENS)
    state = wait_idle(traffic.server)
    assert state["peak_running"] == AT_ONCE  # counted by the server at every step
    assert state["head_pages"]["peak_covered"] <= AT_ONCE * peak <= state["head_pages"]["pool"]
    assert state["head_pages"]["peak_full_kv"] >= AT_ONCE * footprint.full_pages(plan.layout, PROMPT_TOKENS)
    assert sum(answer.retractions for answer in answers) == 0
    agreement = check(oracle, answers[-2:])  # seconds each
    assert agreement.ok, str(agreement)


@tight
def test_their_second_turns_find_them(traffic: Traffic, oracle: Oracle) -> None:
    """The windows at the ends stay when there is no room for anything else."""
    first = traffic.ask([traffic.cut(9000 * i, 3000) for i in range(3)], 20)
    turns = [[*a.prompt_ids, *a.output_ids, *traffic.cut(77, 40)] for a in first]
    second = traffic.ask(turns, 20)
    assert [answer.cached_tokens for answer in second] == [3019 // 16 * 16] * 3
    agreement = check(oracle, second)
    assert agreement.ok, str(agreement)
    assert_healthy(traffic.server)


@pytest.mark.servers("stock-1024")
def test_stock_refuses_one(fleet: Fleet, ids: list[int]) -> None:
    """The same memory without a policy."""
    server = fleet.use("stock-1024")
    body = {"input_ids": ids[:PROMPT_TOKENS], "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    answer = server.client.post("/generate", json=body)
    assert answer.status_code == 400
    assert "6000" in answer.text
    with ThreadPoolExecutor(AT_ONCE) as pool:
        short = list(pool.map(lambda i: server.generate(ids[i : i + 100], 8), range(AT_ONCE)))
    assert [len(a.output_ids) for a in short] == [8] * AT_ONCE
