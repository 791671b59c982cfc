"""Three hundred requests of random lengths over shared prefixes, many of them hung up on, in a tiny pool.

Every invariant is recounted after every step, and freed head-pages are NaN: the first violation ends the
server.
"""

from __future__ import annotations

import pytest

from evaluation.oracle import Oracle, check
from evaluation.traffic import Storm, Traffic
from support.evidence import assert_healthy, kvir_state

CHECKED = 60  # against the oracle; all of them against NaN


@pytest.mark.parametrize("server", ["narrow", "table-retract"], indirect=True)
def test_three_hundred_requests(traffic: Traffic, oracle: Oracle) -> None:
    storm = Storm(requests=300, seed=3, cancel_share=0.2, most_new_tokens=60)
    answers = storm.run(traffic)
    assert 200 < len(answers) < 280
    assert_healthy(traffic.server)
    counters = kvir_state(traffic.server)["counters"]
    for event in ("tombstoned", "healed", "slid_tree", "matches_shortened"):
        assert counters[event] > 0, event
    assert sum(answer.cached_tokens for answer in answers) > 0
    agreement = check(oracle, answers[:: len(answers) // CHECKED])
    assert agreement.ok, str(agreement)
