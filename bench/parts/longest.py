"""The longest single request that a server takes in a pool of given size."""

from __future__ import annotations

import httpx

from evaluation.server import Launch, Server, ServerError, serve

STEP_TOKENS = 16
WAIT_S = 180.0  # several times what the longest prompt takes on a core that has other work


def longest_prompt(launch: Launch, limit_tokens: int) -> int:
    """The longest prompt in tokens, to a multiple of 16, that is served with one token of answer."""
    with serve(launch) as server:
        low, high = STEP_TOKENS, limit_tokens + STEP_TOKENS
        while high - low > STEP_TOKENS:
            middle = (low + high) // 2 // STEP_TOKENS * STEP_TOKENS
            low, high = (middle, high) if _served(server, middle) else (low, middle)
        return low


def _served(server: Server, tokens: int) -> bool:
    """Stock SGLang refuses what is far too long, and lets wait forever what it takes in but cannot place."""
    body = {
        "input_ids": [5 + i % 1000 for i in range(tokens)],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True},
    }
    try:
        answer = server.client.post("/generate", json=body, timeout=WAIT_S)
    except httpx.TimeoutException:
        server.post("/abort_request", {"abort_all": True})
        server.flush_cache()
        return False
    server.flush_cache()
    if not server.alive():
        raise ServerError(server.tail())
    return answer.is_success and len(answer.json()["output_ids"]) == 1
