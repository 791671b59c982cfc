"""What clients can ask of a server, with a policy underneath."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from evaluation.oracle import LOGPROB_TOLERANCE, Oracle, check
from evaluation.server import Served, Server
from evaluation.traffic import Traffic, hang_up, page_floor
from kvir.lowering.footprint import peak_pages
from kvir.lowering.stages import ExecutionPlan
from kvir.sglang_ext.evidence import METRICS
from support.evidence import assert_healthy, kvir_state, wait_idle

PlanOf = Callable[[str], ExecutionPlan]
pytestmark = pytest.mark.parametrize("server", ["ramp"], indirect=True)


def test_chat_through_the_openai_client(traffic: Traffic, oracle: Oracle) -> None:
    server = traffic.server
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        options: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 0}
        prompt = "".join(chr(97 + i * i % 26) for i in range(400))
        whole = client.completions.create(prompt=prompt, extra_body={"ignore_eos": True}, **options)
        parts = list(
            client.completions.create(prompt=prompt, stream=True, extra_body={"ignore_eos": True}, **options)
        )
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24


def test_streaming(traffic: Traffic, oracle: Oracle) -> None:
    """Tokens arrive one by one, and are the ones that come in one piece."""
    prompt = traffic.cut(700, 500)
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True},
        "stream": True,
    }
    pieces: list[list[int]] = []
    with traffic.server.client.stream("POST", "/generate", json=body) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line.removeprefix("data: "))["output_ids"])
    answer = traffic.one_by_one([prompt], 32)[0]
    assert len(pieces) > 8
    assert tuple(pieces[-1]) == answer.output_ids
    agreement = check(oracle, [answer])
    assert agreement.ok, str(agreement)


def test_log_probabilities_of_the_prompt(traffic: Traffic, oracle: Oracle) -> None:
    """Asked for a prompt that is in the cache already: they are the oracle's all the same."""
    prompt = traffic.cut(2000, 900)
    traffic.one_by_one([prompt], 8)
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    meta = traffic.server.post("/generate", body).json()["meta_info"]
    claims = [entry[0] for entry in meta["input_token_logprobs"]]
    assert claims[0] is None
    truth = oracle.force(prompt[:1], prompt[1:]).of(prompt[1:])
    assert max(abs(a - b) for a, b in zip(claims[1:], truth, strict=True)) <= LOGPROB_TOLERANCE


def test_three_samples_of_one_prompt(traffic: Traffic, oracle: Oracle) -> None:
    prompt = traffic.cut(5000, 600)
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 1.0, "n": 3, "max_new_tokens": 40, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 5,
    }
    answers = [served(prompt, answer) for answer in traffic.server.post("/generate", body).json()]
    assert len({answer.output_ids for answer in answers}) == 3
    # sampled, so only log-probabilities can agree
    agreement = check(oracle, answers)
    assert not agreement.nan
    assert agreement.worst_logprob <= LOGPROB_TOLERANCE


def served(prompt: list[int], answer: dict[str, Any]) -> Served:
    meta = answer["meta_info"]
    return Served(
        prompt_ids=tuple(prompt),
        output_ids=tuple(answer["output_ids"]),
        text=answer["text"],
        logprobs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
        top=tuple(
            tuple((int(entry[1]), float(entry[0])) for entry in entries)
            for entries in meta["output_top_logprobs"]
        ),
        cached_tokens=meta["cached_tokens"],
        retractions=0,
        meta=meta,
    )


def test_a_batch_in_one_request(traffic: Traffic, oracle: Oracle) -> None:
    prompts = [traffic.cut(800 * i, 90 + 150 * i) for i in range(4)]
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 5,
    }
    answers = traffic.server.post("/generate", body).json()
    agreement = check(oracle, [served(p, a) for p, a in zip(prompts, answers, strict=True)])
    assert agreement.ok, str(agreement)


def test_only_a_prefill(traffic: Traffic, oracle: Oracle) -> None:
    """No new token at all: the prompt is in the cache afterwards."""
    prompt = traffic.cut(31_000, 777)
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 0}}
    assert traffic.server.post("/generate", body).json()["meta_info"]["completion_tokens"] == 0
    answer = traffic.one_by_one([prompt], 16)[0]
    assert answer.cached_tokens == page_floor(776)
    agreement = check(oracle, [answer])
    assert agreement.ok, str(agreement)


def test_a_flushed_cache_is_empty(traffic: Traffic, oracle: Oracle) -> None:
    prompt = traffic.cut(900, 650)
    first, second = traffic.one_by_one([prompt, prompt], 8)
    traffic.server.flush_cache()
    third = traffic.one_by_one([prompt], 8)[0]
    assert [first.cached_tokens, second.cached_tokens, third.cached_tokens] == [0, page_floor(649), 0]
    assert kvir_state(traffic.server)["head_pages"]["idle"] > 0
    agreement = check(oracle, traffic.served)
    assert agreement.ok, str(agreement)


def test_prefix_caches_of_their_own(traffic: Traffic) -> None:
    """A client's `extra_key` still separates: kvir adds to it and does not replace it."""
    prompt = traffic.cut(1200, 410)
    cached = [
        traffic.server.generate(prompt, 4, extra_key=key).cached_tokens for key in ("a", "b", "a", None)
    ]
    assert cached == [0, 0, page_floor(409), 0]


def aborted_in_its_prefill(server: Server, prompt: list[int], rid: str) -> bool:
    """Whether the request was seen between two chunks of its prompt and aborted there."""
    body = {
        "rid": rid,
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
    }
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(lambda: server.client.post("/generate", json=body))
        while not (seen := any(0 < r["pages"] < 700 for r in kvir_state(server)["running"])):
            if asked.done():
                break
        server.post("/abort_request", {"rid": rid})
        answer = asked.result()
    aborted = answer.status_code != 200 or answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
    return seen and aborted


def test_abort_in_the_middle_of_a_prefill(traffic: Traffic, oracle: Oracle) -> None:
    server = traffic.server
    # on a busy machine one may end before anyone looks
    prompts = [traffic.cut(3_001 * i, 12_000) for i in range(8)]
    prompt = next(p for i, p in enumerate(prompts) if aborted_in_its_prefill(server, p, f"to-be-aborted-{i}"))
    assert wait_idle(server)["head_pages"]["covered"] == 0
    # what the aborted prefill left in the cache is right
    again = traffic.one_by_one([prompt[:3000]], 16)
    agreement = check(oracle, again)
    assert agreement.ok, str(agreement)
    assert_healthy(server)


def test_clients_that_hang_up(traffic: Traffic) -> None:
    prompts = [traffic.cut(777 * i, 500 + 700 * i) for i in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda i: hang_up(traffic.server, prompts[i], 400, 0.05 + 0.1 * i), range(6)))
    assert wait_idle(traffic.server)["head_pages"]["covered"] == 0
    assert_healthy(traffic.server)


def test_a_prompt_that_can_never_fit_is_refused(traffic: Traffic, plan_of: PlanOf) -> None:
    """A quarter of the heads keep everything, so even this policy has a longest context: shorter than the
    model's, and shorter than the logical token ids that the server has.
    """
    server, layout = traffic.server, plan_of("ramp").layout
    state = kvir_state(server)
    most = max(n for n in range(1, 17_000) if peak_pages(layout, n) <= state["head_pages"]["pool"])
    assert most + 100 < min(state["logical_tokens"], 16_384)
    body = {"input_ids": traffic.cut(0, most), "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    answer = server.client.post("/generate", json=body)
    assert answer.status_code == 400
    assert_healthy(server)


def test_a_generation_is_cut_to_what_fits(traffic: Traffic, plan_of: PlanOf) -> None:
    server, layout = traffic.server, plan_of("ramp").layout
    pool = kvir_state(server)["head_pages"]["pool"]
    most = max(n for n in range(1, 17_000) if peak_pages(layout, n) <= pool)
    answer = traffic.one_by_one([traffic.cut(0, most - 40)], 200)[0]
    assert 32 <= len(answer.output_ids) <= 41
    assert answer.meta["finish_reason"]["type"] == "length"
    assert_healthy(server)


def test_metrics(traffic: Traffic) -> None:
    traffic.one_by_one([traffic.cut(4000, 1500)], 64)
    state = wait_idle(traffic.server)
    deadline = time.monotonic() + 120
    while (found := traffic.server.metrics())["kvir_covered_bytes"] != 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert set(METRICS) <= set(found)
    for name in ("kvir_pool_bytes", "kvir_idle_bytes", "kvir_free_bytes", "kvir_peak_covered_bytes"):
        assert found[name] == state["metrics"][name]
    assert found["kvir_pool_bytes"] == found["kvir_idle_bytes"] + found["kvir_free_bytes"]
    assert 0 < found["kvir_peak_covered_bytes"] < found["kvir_peak_full_kv_bytes"]
    assert found["kvir_rows_never_written"] > 0


def test_evidence_of_one_request(traffic: Traffic) -> None:
    answer = traffic.one_by_one([traffic.cut(8000, 1000)], 32)[0]
    end = wait_idle(traffic.server)["finished"][-1]
    assert end["rid"] == answer.meta["id"]
    assert (end["prompt_tokens"], end["cached_tokens"]) == (1000, 0)
    assert 0 < end["bytes_held"] < end["bytes_full"]
    assert end["bytes_full"] == end["head_pages_full"] * kvir_state(traffic.server)["head_page_bytes"]


def test_the_server_says_what_it_runs(server: Server, plan_of: PlanOf) -> None:
    state = kvir_state(server)
    plan = plan_of("ramp")
    assert (state["plan"], state["fingerprint"]) == (plan.policy.name, plan.fingerprint)
    assert state["kernels"] == plan.choices[0].implementation
    assert httpx.get(server.url + "/health_generate", timeout=30).status_code == 200
