"""The Triton kernels in a real server, in Triton's interpreter: the whole way of a step's metadata, from
SGLang's request rows to page lists and work lists.  What is served equals the oracle.

The interpreter is slow, so requests are few and short: a prompt of two chunks, one of a few pages, one of two
pages and a row, together.
"""

from __future__ import annotations

import pytest

from evaluation.oracle import Oracle, check
from evaluation.selection_oracle import replays
from evaluation.traffic import Traffic
from evaluation.watch import prefills
from support.evidence import assert_healthy, kvir_state

NAMES = ("triton-uniform", "triton-snapkv", "triton-laprox")


@pytest.mark.parametrize("server", NAMES, indirect=True)
def test_served_equals_the_oracle(traffic: Traffic, oracle: Oracle) -> None:
    prompts = [traffic.cut(500, 300), traffic.cut(1000, 70), traffic.cut(2000, 33)]
    traffic.ask(prompts, 6)
    (again,) = traffic.one_by_one([prompts[0]], 3)
    assert again.cached_tokens > 0
    agreement = check(oracle, replays(traffic.served, prefills(traffic.server)))
    assert agreement.ok, str(agreement)
    assert agreement.tokens >= 21
    state = kvir_state(traffic.server)
    assert state["kernels"] == "triton"
    assert_healthy(traffic.server)
