"""The longest single request that a server takes in a pool of given size."""

from __future__ import annotations

from evaluation.server import Launch, Server, ServerError, serve

STEP_TOKENS = 16


def longest_prompt(launch: Launch, limit_tokens: int) -> int:
    """The longest prompt in tokens, to a multiple of 16, that is served with one token of answer."""
    with serve(launch) as server:
        low, high = STEP_TOKENS, limit_tokens + STEP_TOKENS
        while high - low > STEP_TOKENS:
            middle = (low + high) // 2 // STEP_TOKENS * STEP_TOKENS
            low, high = (middle, high) if _served(server, middle) else (low, middle)
        return low


def _served(server: Server, tokens: int) -> bool:
    try:
        answer = server.generate([5 + i % 1000 for i in range(tokens)], 1, top_logprobs=1)
    except ServerError:
        if not server.alive():
            raise
        return False
    finally:
        server.flush_cache()
    return len(answer.output_ids) == 1
