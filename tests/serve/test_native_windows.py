"""A model with sliding layers of its own (Gemma 3): their rows outside the window are freed, which changes
nothing; the global layers obey a policy beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from evaluation.oracle import LOGPROB_TOLERANCE, Masks, Oracle, check
from evaluation.server import Launch, Served, Server, serve
from evaluation.traffic import Traffic, edges, eight, found_again, second_turns, shared_prefix
from kvir.lowering import footprint
from kvir.lowering.load import plan_for_server
from kvir.lowering.stages import LayoutPlan
from support import tiny_gemma
from support.evidence import assert_healthy, wait_idle
from support.servers import CHECKS, CHUNK_TOKENS

PROMPT_TOKENS, NEW_TOKENS = 2000, 48
IDENTITY = Path(__file__).parents[2] / "examples/identity.ir"
GLOBAL = "kvir: 1\nname: global\nrules:\n  - {layers: [2, 5], keep: [{sink: 4}, {recent: 150}]}\n"


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gemma.make(tmp_path_factory.mktemp("gemma") / "model")


@contextmanager
def serving(model: Path, policy: Path | None) -> Iterator[Server]:
    launch = Launch(
        model=model,
        kv_ir=policy,
        max_total_tokens=4096,
        chunked_prefill_tokens=CHUNK_TOKENS,
        environment=CHECKS,
    )
    with serve(launch) as server:
        yield server


def answers_of(server: Server, ids: Sequence[int]) -> list[Served]:
    traffic = Traffic(server, ids)
    eight(traffic, lengths=(30, 72, 73, 150, 255, 400, 700, 1000))
    edges(traffic, lengths=(15, 16, 71, 72, 73, 88, 255, 256, 257))
    shared_prefix(traffic, prefix_tokens=500, branches=3)
    return traffic.served


def test_identity_is_stock_and_holds_the_window_alone(gemma: Path, ids: list[int]) -> None:
    with serving(gemma, None) as server:
        stock = answers_of(server, ids)
    with serving(gemma, IDENTITY) as server:
        ours = answers_of(server, ids)
        assert_healthy(server)
        server.flush_cache()
        Traffic(server, ids).one_by_one([ids[:PROMPT_TOKENS]], NEW_TOKENS)
        entry = wait_idle(server)["finished"][-1]
    assert [answer.output_ids for answer in ours] == [answer.output_ids for answer in stock]
    pairs = [
        pair
        for mine, its in zip(ours, stock, strict=True)
        for pair in zip(mine.logprobs, its.logprobs, strict=True)
    ]
    assert max(abs(a - b) for a, b in pairs) <= LOGPROB_TOLERANCE
    layout = plan_for_server(IDENTITY, gemma, dtype="float32").layout
    tokens = PROMPT_TOKENS + NEW_TOKENS - 1  # the last one was never an input
    assert entry["head_pages_held"] in _held(layout)
    assert entry["head_pages_full"] == footprint.full_pages(layout, tokens)
    # two global layers of six, and six pages of four sliding ones
    assert entry["head_pages_held"] < 0.4 * entry["head_pages_full"]


def test_a_policy_on_the_global_layers_is_the_oracle(gemma: Path, ids: list[int], tmp_path: Path) -> None:
    policy = tmp_path / "global.ir"
    policy.write_text(GLOBAL)
    plan = plan_for_server(policy, gemma, dtype="float32")
    with serving(gemma, policy) as server:
        served = answers_of(server, ids)
        traffic = Traffic(server, ids)
        chats = second_turns(traffic, lengths=(100, 304))
        served += traffic.served
        assert_healthy(server)
        server.flush_cache()
        served += traffic.one_by_one([ids[:PROMPT_TOKENS]], NEW_TOKENS)
        held = wait_idle(server)["finished"][-1]["head_pages_held"]
    assert held in _held(plan.layout)
    agreement = check(Oracle(gemma, Masks.of(plan.budgeted)), served)
    assert agreement.ok, str(agreement)
    for first, *later in chats:
        assert later[0].cached_tokens == found_again(first)
    # the masks without the model's own windows are another model
    masks = Masks.of(plan.budgeted)
    blind = Masks(*({i: rows[i] for i in (2, 5)} for rows in (masks.prefill, masks.decode)))
    assert not check(Oracle(gemma, blind), served[:8]).ok


def _held(layout: LayoutPlan) -> range:
    """Head-pages of the long request at its end: the resident ones, or a page more a unit."""
    tokens = PROMPT_TOKENS + NEW_TOKENS - 1  # the last one was never an input
    return range(footprint.resident_pages(layout, tokens), footprint.peak_pages(layout, tokens) + 1)
