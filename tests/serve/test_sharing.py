"""Sharing that matters: a long system prompt and many users, under windows much shorter than it."""

from __future__ import annotations

import pytest

from evaluation.oracle import Oracle, check
from evaluation.traffic import Traffic, page_floor, shared_prefix
from support.evidence import kvir_state

SYSTEM_TOKENS = 1000
pytestmark = pytest.mark.parametrize("server", ["uniform"], indirect=True)


def test_ten_users_of_one_system_prompt(traffic: Traffic, oracle: Oracle) -> None:
    one_by_one, at_once = shared_prefix(traffic, SYSTEM_TOKENS, branches=10)
    assert [user.cached_tokens for user in one_by_one[2:]] == [page_floor(SYSTEM_TOKENS)] * 8
    assert [user.cached_tokens for user in at_once] == [page_floor(SYSTEM_TOKENS)] * 10
    agreement = check(oracle, traffic.served)
    assert agreement.ok, str(agreement)


def test_the_end_of_a_shared_prefix_goes_last(traffic: Traffic, oracle: Oracle) -> None:
    """Other prompts take all memory that is left, several times over; the next user still finds it."""
    shared_prefix(traffic, SYSTEM_TOKENS, branches=3)
    before = kvir_state(traffic.server)["counters"].get("tombstoned", 0)
    for i in range(6):
        traffic.one_by_one([traffic.cut(15_000 + 4000 * i, 3500)], 8)
    assert kvir_state(traffic.server)["counters"]["tombstoned"] > before
    user = traffic.one_by_one([traffic.cut(3000, SYSTEM_TOKENS) + traffic.cut(99, 40)], 16)[0]
    assert user.cached_tokens >= 960
    agreement = check(oracle, traffic.served)
    assert agreement.ok, str(agreement)
