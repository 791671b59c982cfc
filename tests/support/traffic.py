"""Traffic that puts a server through everything a policy can break: page and chunk edges, concurrency, re-
hits, second turns, branches, long prompts, cancels.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from evaluation.server import Served, Server

# lengths at and around the page (16) and the chunk (256)
EDGE_LENGTHS = (3, 15, 16, 17, 31, 32, 33, 100, 255, 256, 257, 300, 511, 513, 700)


@dataclass
class Traffic:
    """Requests to one server.  `ids` is the token stream that prompts are cut from."""

    server: Server
    ids: Sequence[int]
    served: list[Served] = field(default_factory=list[Served])

    def ask(self, prompts: Sequence[Sequence[int]], tokens: int, concurrency: int = 8) -> list[Served]:
        answers = self.server.generate_all(prompts, tokens, concurrency=concurrency)
        self.served += answers
        return answers

    def cut(self, start: int, length: int) -> list[int]:
        start %= max(1, len(self.ids) - length)
        return list(self.ids[start : start + length])


def edges(traffic: Traffic, tokens: int = 20, lengths: Sequence[int] = EDGE_LENGTHS) -> list[Served]:
    """Eight at once; then the same again (prefix hits), second turns, and branches in the middle."""
    prompts = [traffic.cut(i * 1777, n) for i, n in enumerate(lengths)]
    first = traffic.ask(prompts, tokens)
    again = traffic.ask(prompts, tokens)
    assert [a.output_ids for a in first] == [a.output_ids for a in again]
    turns = [[*a.prompt_ids, *a.output_ids, *traffic.cut(50 + i, 40)] for i, a in enumerate(first)]
    second = traffic.ask(turns, tokens)
    traffic.ask([p[: len(p) // 2] + traffic.cut(9000 + i, 90) for i, p in enumerate(prompts)], tokens)
    return second


def shared_prefix(
    traffic: Traffic, prefix_tokens: int = 1000, branches: int = 6, tokens: int = 16
) -> list[Served]:
    """One long prefix, then branches from it one after another and at once."""
    prefix = traffic.cut(3000, prefix_tokens)
    one_by_one = [
        traffic.ask([prefix + traffic.cut(7000 + 60 * i, 30 + i)], tokens)[0] for i in range(branches)
    ]
    traffic.ask([prefix + traffic.cut(8000 + 60 * i, 30 + i) for i in range(branches)], tokens)
    return one_by_one


def long_then_return(traffic: Traffic, length: int = 1500, tokens: int = 40) -> list[Served]:
    """A writer moves far past its prefix; the prefix, its branches and its second turn come back later."""
    prompt = traffic.cut(11000, length)
    first = traffic.ask([prompt], tokens)[0]
    return traffic.ask([prompt[: length // 2] + traffic.cut(100, 50)], tokens) + traffic.ask(
        [
            [*prompt, *first.output_ids, *traffic.cut(600, 30)],
            [*prompt, *first.output_ids[: tokens // 2], *traffic.cut(300, 50)],
            prompt,
            prompt[:500],
        ],
        tokens,
        concurrency=2,
    )


def storm(
    traffic: Traffic,
    *,
    requests: int,
    seed: int,
    concurrency: int = 12,
    longest: int = 900,
    most_new: int = 120,
    cancel_share: float = 0.0,
) -> None:
    """Random lengths over a few shared prefixes; some clients hang up in the middle."""
    rng = random.Random(seed)
    bases = [traffic.cut(start, rng.randrange(longest // 3, longest)) for start in (0, 20000, 40000)]
    jobs: list[Callable[[], Served | None]] = []
    for _ in range(requests):
        base = rng.choice(bases)
        prompt = base[: rng.randrange(1, len(base))] + traffic.cut(
            rng.randrange(50000), rng.randrange(1, longest // 3)
        )
        tokens = rng.randrange(1, most_new)
        if rng.random() < cancel_share:
            jobs.append(_hang_up(traffic.server, prompt, tokens, rng.uniform(0.05, 1.5)))
        else:
            jobs.append(_ask_one(traffic.server, prompt, tokens))
    with ThreadPoolExecutor(concurrency) as pool:
        traffic.served += [answer for answer in pool.map(lambda job: job(), jobs) if answer is not None]


def _ask_one(server: Server, prompt: list[int], tokens: int) -> Callable[[], Served | None]:
    return lambda: server.generate(prompt, tokens)


def _hang_up(server: Server, prompt: list[int], tokens: int, after_s: float) -> Callable[[], Served | None]:
    def job() -> Served | None:
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        with contextlib.suppress(httpx.TimeoutException):
            httpx.post(server.url + "/generate", json=body, timeout=after_s)
        return None

    return job
