"""Every kind of traffic under four policies: what is served equals the oracle, token for token and in its
log-probabilities.

Servers called `*-retract` run without overlap and take requests back every few steps.  A request that was
taken back is prefilled anew, outputs and all: where decode keeps less than prefill (`phased`), that is
another computation than the oracle's, so that policy runs without.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from evaluation.oracle import Oracle, check
from evaluation.server import Served, Server
from evaluation.traffic import (
    Storm,
    Traffic,
    edges,
    eight,
    found_again,
    page_floor,
    passed_prefix,
    second_turns,
    shared_prefix,
)
from support.evidence import assert_healthy, kvir_state

POLICIES = ("uniform", "table", "ramp", "narrow")
pytestmark = pytest.mark.parametrize(
    "server", [*POLICIES, "phased", *(f"{name}-retract" for name in POLICIES)], indirect=True
)


def agrees(oracle: Oracle, served: Sequence[Served]) -> None:
    agreement = check(oracle, served)
    assert agreement.ok, str(agreement)


def retracts(server: Server) -> bool:
    return "SGLANG_TEST_RETRACT" in server.launch.environment


def phased(oracle: Oracle) -> bool:
    return oracle.masks.prefill != oracle.masks.decode


def test_one_prompt(traffic: Traffic, oracle: Oracle) -> None:
    """A prompt of several chunks that leaves every window behind, alone; then again, from the cache."""
    prompt = traffic.cut(500, 1203)
    first, again = traffic.one_by_one([prompt, prompt], 64)
    assert first.cached_tokens == 0
    assert again.cached_tokens == page_floor(1202)
    assert again.output_ids == first.output_ids
    agrees(oracle, traffic.served)


def test_eight_at_once(traffic: Traffic, oracle: Oracle) -> None:
    answers = eight(traffic)
    agrees(oracle, answers)
    assert (sum(answer.retractions for answer in answers) > 0) == retracts(traffic.server)


def test_lengths_around_pages_and_chunks(traffic: Traffic, oracle: Oracle) -> None:
    first, again = edges(traffic)
    agrees(oracle, first + again)
    assert sum(answer.cached_tokens for answer in again) > 0


def test_second_turns(traffic: Traffic, oracle: Oracle) -> None:
    """A chat's next turn finds every whole page of the turn before; of its prompt alone where decode keeps
    less than prefill.
    """
    chats = second_turns(traffic)
    agrees(oracle, traffic.served)
    for chat in chats:
        for before, turn in pairwise(chat):
            whole = page_floor(len(before.prompt_ids)) if phased(oracle) else found_again(before)
            assert turn.cached_tokens == whole


def test_a_shared_prefix_and_branches(traffic: Traffic, oracle: Oracle) -> None:
    """From the third branch on the whole prefix is found: the second one computes it again and keeps the
    windows before the branch point.
    """
    one_by_one, at_once = shared_prefix(traffic)
    agrees(oracle, traffic.served)
    assert [answer.cached_tokens for answer in one_by_one[2:]] == [page_floor(1000)] * 3
    if not retracts(traffic.server):
        assert [answer.cached_tokens for answer in at_once] == [page_floor(1000)] * 5


def test_a_prefix_that_its_writer_left_behind(traffic: Traffic, oracle: Oracle) -> None:
    """Windows that are gone are computed again, never read."""
    before = kvir_state(traffic.server)["counters"].get("matches_shortened", 0)
    passed_prefix(traffic)
    agrees(oracle, traffic.served)
    assert kvir_state(traffic.server)["counters"]["matches_shortened"] > before


def test_random_traffic(traffic: Traffic, oracle: Oracle) -> None:
    """Shared prefixes, short and long, at once; every sixth client hangs up."""
    storm = Storm(requests=40, seed=len(traffic.server.launch.arguments), cancel_share=1 / 6)
    answers = storm.run(traffic)
    agrees(oracle, answers)
    assert sum(answer.cached_tokens for answer in answers) > 0


def test_nothing_is_left(traffic: Traffic) -> None:
    """After all of it no request holds anything, every head-page is accounted for, no check has failed."""
    assert_healthy(traffic.server)
    assert kvir_state(traffic.server)["physical_tokens"] == traffic.server.launch.max_total_tokens
