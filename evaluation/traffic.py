"""Traffic that puts a server through everything a policy can break: page and chunk edges, concurrency, prefix
hits, second turns, branches, prefixes that their writer has left behind, cancels.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx

from evaluation.server import Served, Server

PAGE_TOKENS = 16
EIGHT_LENGTHS = (30, 100, 255, 400, 513, 700, 1000, 1500)
# at and around the page (16) and the chunk (256)
EDGE_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 239, 240, 241, 255, 256, 257, 271, 272, 273, 511, 512, 513, 768)


@dataclass
class Traffic:
    """Requests to one server.  `ids` is the token stream that prompts are cut from."""

    server: Server
    ids: Sequence[int]
    served: list[Served] = field(default_factory=list[Served])

    def ask(self, prompts: Sequence[Sequence[int]], new_tokens: int, *, concurrency: int = 8) -> list[Served]:
        """Answers in the order of the prompts; all of them are remembered in `served`."""
        answers = self.server.generate_all(prompts, new_tokens, concurrency=concurrency)
        self.served += answers
        return answers

    def one_by_one(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[Served]:
        return self.ask(prompts, new_tokens, concurrency=1)

    def cut(self, start: int, length: int) -> list[int]:
        start %= max(1, len(self.ids) - length)
        return list(self.ids[start : start + length])


def page_floor(tokens: int) -> int:
    return tokens // PAGE_TOKENS * PAGE_TOKENS


def found_again(answer: Served) -> int:
    """Tokens of a finished request that its own next turn finds: whole pages of all but the last token, which
    was never an input.
    """
    return page_floor(len(answer.prompt_ids) + len(answer.output_ids) - 1)


def eight(traffic: Traffic, new_tokens: int = 64, lengths: Sequence[int] = EIGHT_LENGTHS) -> list[Served]:
    """Eight prompts at once."""
    return traffic.ask([traffic.cut(1777 * i, n) for i, n in enumerate(lengths)], new_tokens)


def edges(
    traffic: Traffic, new_tokens: int = 20, lengths: Sequence[int] = EDGE_LENGTHS
) -> tuple[list[Served], list[Served]]:
    """Every length, eight at a time, each eight twice: the second time over what the first left behind."""
    prompts = [traffic.cut(20_000 + 997 * i, n) for i, n in enumerate(lengths)]
    first: list[Served] = []
    again: list[Served] = []
    for start in range(0, len(prompts), 8):
        first += traffic.ask(prompts[start : start + 8], new_tokens)
        again += traffic.ask(prompts[start : start + 8], new_tokens)
    return first, again


def second_turns(
    traffic: Traffic, new_tokens: int = 24, lengths: Sequence[int] = (17, 100, 304, 700)
) -> list[tuple[Served, Served, Served]]:
    """Chats of three turns, each turn asked when the one before is answered."""
    chats: list[tuple[Served, Served, Served]] = []
    for i, length in enumerate(lengths):
        answers: list[Served] = []
        text = traffic.cut(40_000 + 1501 * i, length)
        for turn in range(3):
            answers += traffic.one_by_one([text], new_tokens)
            text = [*text, *answers[-1].output_ids, *traffic.cut(100 + 50 * i + 10 * turn, 23 + 9 * turn)]
        chats.append((answers[0], answers[1], answers[2]))
    return chats


def shared_prefix(
    traffic: Traffic,
    prefix_tokens: int = 1000,
    branches: int = 5,
    new_tokens: int = 16,
    start: int = 3000,
) -> tuple[list[Served], list[Served]]:
    """One long prefix: branches from it one after another, then as many at once."""
    prefix = traffic.cut(start, prefix_tokens)
    tails = [traffic.cut(7000 + 60 * i, 30 + i) for i in range(2 * branches)]
    one_by_one = traffic.one_by_one([prefix + tail for tail in tails[:branches]], new_tokens)
    return one_by_one, traffic.ask([prefix + tail for tail in tails[branches:]], new_tokens)


def passed_prefix(
    traffic: Traffic, prefix_tokens: int = 1500, new_tokens: int = 40, steps: int = 5, others: int = 4
) -> list[Served]:
    """A writer moves far past its prompt, and others take what memory it left; then its beginnings, branches
    from them and the whole come back.
    """
    prompt = traffic.cut(11_000, prefix_tokens)
    first = traffic.one_by_one([prompt], 2 * new_tokens)[0]
    traffic.ask([traffic.cut(23_000 + 1700 * i, prefix_tokens) for i in range(others)], new_tokens)
    starts = [prefix_tokens * (i + 1) // (steps + 1) for i in range(steps)]
    back = traffic.one_by_one([prompt[:n] + traffic.cut(100 + n, 50) for n in starts], new_tokens)
    back += traffic.ask(
        [
            prompt,
            prompt[: prefix_tokens // 3],
            [*prompt, *first.output_ids[:new_tokens], *traffic.cut(300, 50)],
            [*prompt, *first.output_ids, *traffic.cut(600, 30)],
        ],
        new_tokens,
        concurrency=4,
    )
    return [first, *back]


@dataclass(frozen=True)
class Storm:
    """Random lengths over a few shared prefixes; some clients hang up in the middle."""

    requests: int
    seed: int
    concurrency: int = 12
    longest_tokens: int = 900
    most_new_tokens: int = 120
    cancel_share: float = 0.0
    cancel_after_s: tuple[float, float] = (0.02, 0.6)

    def run(self, traffic: Traffic) -> list[Served]:
        """The answers of those who stayed."""
        jobs = list(self._jobs(traffic))
        with ThreadPoolExecutor(self.concurrency) as pool:
            answers = [answer for answer in pool.map(lambda job: job(), jobs) if answer is not None]
        traffic.served += answers
        return answers

    def _jobs(self, traffic: Traffic) -> Sequence[Callable[[], Served | None]]:
        rng = random.Random(self.seed)
        longest, server = self.longest_tokens, traffic.server
        bases = [traffic.cut(rng.randrange(50_000), rng.randrange(longest // 3, longest)) for _ in range(4)]
        jobs: list[Callable[[], Served | None]] = []
        for _ in range(self.requests):
            base = rng.choice(bases)
            prompt = base[: rng.randrange(1, len(base))] + traffic.cut(
                rng.randrange(50_000), rng.randrange(1, longest // 3)
            )
            new_tokens = rng.randrange(1, self.most_new_tokens)
            if rng.random() < self.cancel_share:
                jobs.append(_hang_up(server, prompt, new_tokens, rng.uniform(*self.cancel_after_s)))
            else:
                jobs.append(_stay(server, prompt, new_tokens))
        return jobs


def _stay(server: Server, prompt: list[int], new_tokens: int) -> Callable[[], Served | None]:
    return lambda: server.generate(prompt, new_tokens)


def _hang_up(
    server: Server, prompt: list[int], new_tokens: int, after_s: float
) -> Callable[[], Served | None]:
    def job() -> Served | None:
        hang_up(server, prompt, new_tokens, after_s)
        return None

    return job


def hang_up(server: Server, prompt: Sequence[int], new_tokens: int, after_s: float) -> None:
    """Send a request and close the connection after `after_s` seconds."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
    }
    timeout = httpx.Timeout(after_s, connect=10)
    with contextlib.suppress(httpx.TimeoutException), httpx.Client(trust_env=False) as client:
        client.post(server.url + "/generate", json=body, timeout=timeout)
