"""`keep: all` is stock SGLang: the same tokens, the same log-probabilities, the same prefix hits."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from evaluation.oracle import LOGPROB_TOLERANCE
from evaluation.server import Served, Server
from evaluation.traffic import Traffic, edges, eight, second_turns, shared_prefix
from support.evidence import assert_healthy
from support.fleet import Fleet


def answers_of(server: Server, ids: Sequence[int]) -> list[Served]:
    traffic = Traffic(server, ids)
    eight(traffic)  # 30 to 1,500 tokens, 64 new ones each
    edges(traffic)
    second_turns(traffic)
    shared_prefix(traffic)
    return traffic.served


@pytest.mark.servers("stock", "identity")
def test_identity_is_stock(fleet: Fleet, ids: list[int]) -> None:
    stock = answers_of(fleet.use("stock"), ids)
    server = fleet.use("identity")
    ours = answers_of(server, ids)
    assert [answer.output_ids for answer in ours] == [answer.output_ids for answer in stock]
    assert worst_difference(ours, stock) <= LOGPROB_TOLERANCE
    assert [answer.cached_tokens for answer in ours] == [answer.cached_tokens for answer in stock]
    assert_healthy(server)


def worst_difference(ours: Sequence[Served], stock: Sequence[Served]) -> float:
    """Of any log-probability: of the token served, and of the five best, by rank (near the fifth place two
    candidates may change places).
    """
    worst = 0.0
    for mine, theirs in zip(ours, stock, strict=True):
        pairs = list(zip(mine.logprobs, theirs.logprobs, strict=True))
        for best, stock_best in zip(mine.top, theirs.top, strict=True):
            assert len(best) == len(stock_best) == 5
            pairs += [(a, b) for (_, a), (_, b) in zip(best, stock_best, strict=True)]
        differences = [abs(a - b) for a, b in pairs]
        assert all(d == d for d in differences), "a log-probability is not a number"
        worst = max(worst, *differences)
    return worst
