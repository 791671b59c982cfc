"""Rows by score in a real server: what is served equals the oracle, and memory is the budget's, to the page.

A request that was taken back selects again at its new length; the oracle is asked once for each prefill.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evaluation.oracle import Oracle, check
from evaluation.selection_oracle import replays
from evaluation.server import Server
from evaluation.traffic import (
    Storm,
    Traffic,
    edges,
    eight,
    page_floor,
    passed_prefix,
    second_turns,
    shared_prefix,
)
from evaluation.watch import prefills
from kvir.lowering import footprint
from kvir.lowering.stages import ExecutionPlan
from kvir.sglang_ext.selecting_rules import observed_at_prompt_end
from support.evidence import assert_healthy, kvir_state

SERVERS = (
    "methods",
    "rivals",
    "rivals-retract",
    "accumulated",
    "blocks",
    "blocks-retract",
    "folding",
    "folding-retract",
    "merging",
    "merging-retract",
)


@pytest.fixture
def plan(plan_of: Callable[[str], ExecutionPlan]) -> ExecutionPlan:
    return plan_of("rivals")


every_server = pytest.mark.parametrize("server", SERVERS, indirect=True)


def agrees(traffic: Traffic, oracle: Oracle) -> None:
    agreement = check(oracle, replays(traffic.served, prefills(traffic.server)))
    assert agreement.ok, str(agreement)


def retracts(server: Server) -> bool:
    return "SGLANG_TEST_RETRACT" in server.launch.environment


def eight_agree(traffic: Traffic, oracle: Oracle) -> None:
    """Eight at once; requests are taken back where the server was told so, and only there."""
    answers = eight(traffic, new_tokens=40)
    agrees(traffic, oracle)
    assert (sum(answer.retractions for answer in answers) > 0) == retracts(traffic.server)


def selected_and_left_nothing(server: Server) -> None:
    assert_healthy(server)
    counters = kvir_state(server)["counters"]
    assert counters["selections"] > 20
    assert counters["rows_evicted"] > 0
    elsewhere = server.launch.module != "sglang.launch_server"
    assert ("rows are selected on cuda" in server.log.read_text()) == elsewhere


@every_server
class TestServed:
    def test_eight_at_once(self, traffic: Traffic, oracle: Oracle) -> None:
        eight_agree(traffic, oracle)

    def test_lengths_around_pages_and_chunks(self, traffic: Traffic, oracle: Oracle) -> None:
        edges(traffic, new_tokens=18)
        agrees(traffic, oracle)

    def test_second_turns_and_branches(self, traffic: Traffic, oracle: Oracle) -> None:
        """The tree has every row of a prompt, as long as memory allows; answers are not in it, and
        the queries that scores look at are computed again.
        """
        second_turns(traffic)
        shared_prefix(traffic, branches=3)
        passed_prefix(traffic, steps=3)
        agrees(traffic, oracle)

    def test_random_traffic(self, traffic: Traffic, oracle: Oracle) -> None:
        Storm(requests=40, seed=7, cancel_share=1 / 6).run(traffic)
        agrees(traffic, oracle)

    def test_nothing_is_left(self, traffic: Traffic) -> None:
        selected_and_left_nothing(traffic.server)


@pytest.mark.parametrize("server", ["folding-ranks", "merging-ranks-retract"], indirect=True)
class TestRanks:
    """Two ranks, each with one of the heads of every layer, give the tokens of one."""

    def test_eight_at_once(self, traffic: Traffic, oracle: Oracle) -> None:
        assert kvir_state(traffic.server)["ranks"] == 2
        eight_agree(traffic, oracle)

    def test_random_traffic(self, traffic: Traffic, oracle: Oracle) -> None:
        Storm(requests=40, seed=11, cancel_share=1 / 6).run(traffic)
        agrees(traffic, oracle)

    def test_nothing_is_left(self, traffic: Traffic) -> None:
        selected_and_left_nothing(traffic.server)


@pytest.mark.parametrize("server", ["folding-compiled"], indirect=True)
class TestCompiled:
    """SGLang's `--enable-torch-compile`: the decode step is compiled around attention, batches are padded."""

    def test_eight_at_once(self, traffic: Traffic, oracle: Oracle) -> None:
        eight_agree(traffic, oracle)
        log = traffic.server.log.read_text()
        assert "cpu graph: True" in log
        assert "graph break" not in log.lower()

    def test_random_traffic(self, traffic: Traffic, oracle: Oracle) -> None:
        Storm(requests=40, seed=13, cancel_share=1 / 6).run(traffic)
        agrees(traffic, oracle)

    def test_nothing_is_left(self, traffic: Traffic) -> None:
        selected_and_left_nothing(traffic.server)


@pytest.mark.parametrize("server", ["rivals"], indirect=True)
class TestMemory:
    def test_a_compacted_prompt_is_found_again(self, traffic: Traffic, plan: ExecutionPlan) -> None:
        """Its rows left the request, not the tree; what scores observe is computed again."""
        prompt = traffic.cut(500, 1203)
        first, again = traffic.one_by_one([prompt, prompt], 8)
        observed = observed_at_prompt_end(plan)
        assert observed == 32
        assert first.cached_tokens == 0
        assert again.cached_tokens == page_floor(1203 - observed)
        assert again.output_ids == first.output_ids

    def test_memory_after_the_prompt_is_the_budget(self, traffic: Traffic, plan: ExecutionPlan) -> None:
        """What a request holds at its end lies within the planner's bounds, and is far below full KV."""
        traffic.one_by_one([traffic.cut(900, 2000)], 30)
        entry = kvir_state(traffic.server)["finished"][-1]
        bounds = footprint.done_pages(plan.layout, 2000 + 30 - 1, 2000)
        assert bounds.least <= entry["head_pages_held"] <= bounds.most
        assert entry["head_pages_held"] < 0.35 * entry["head_pages_full"]

    def test_a_prefix_goes_when_others_need_its_memory(self, traffic: Traffic) -> None:
        prompt = traffic.cut(500, 1203)
        traffic.one_by_one([prompt], 8)
        traffic.ask([traffic.cut(5000 + 1900 * i, 1800) for i in range(6)], 8)
        counters = kvir_state(traffic.server)["counters"]
        assert counters["tombstoned"] + counters.get("tree_evictions", 0) > 0
        (again,) = traffic.one_by_one([prompt], 8)
        assert again.cached_tokens < page_floor(1203 - 32)
