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

NAMES = ("triton-uniform", "triton-snapkv", "triton-laprox", "triton-captured-retract")
NEW_TOKENS = {"captured": 10}  # its heads select at every token, every 3 and every 4


@pytest.mark.parametrize("server", NAMES, indirect=True)
def test_served_equals_the_oracle(traffic: Traffic, oracle: Oracle) -> None:
    launch = traffic.server.launch
    assert launch.kv_ir is not None
    new_tokens = NEW_TOKENS.get(launch.kv_ir.stem, 6)
    prompts = [traffic.cut(500, 300), traffic.cut(1000, 70), traffic.cut(2000, 33)]
    traffic.ask(prompts, new_tokens)
    (again,) = traffic.one_by_one([prompts[0]], 3)
    # a score that looks at all queries needs them all
    assert (again.cached_tokens > 0) == (launch.kv_ir.stem != "snapkv")
    agreement = check(oracle, replays(traffic.served, prefills(traffic.server)))
    assert agreement.ok, str(agreement)
    assert agreement.tokens == 3 * new_tokens + 3
    state = kvir_state(traffic.server)
    assert state["kernels"] == "triton"
    assert state["sums"] == ("triton" if launch.kv_ir.stem != "uniform" else "")
    assert state["copies"] == state["sums"]
    layers = 4 if launch.module == "support.flashinfer_server" else 0
    assert state["flashinfer_layers"] == layers
    assert state["selects_on_device"] == (launch.kv_ir.stem == "captured")
    retractions = sum(answer.retractions for answer in traffic.served)
    assert (retractions > 0) == ("SGLANG_TEST_RETRACT" in launch.environment)
    assert_healthy(traffic.server)
