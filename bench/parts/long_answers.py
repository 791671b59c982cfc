"""Long answers under given tokens: what a policy that drops rows while decoding loses on the way.

An answer of 2,000 tokens follows a short prompt.  In half of the answers text just goes on; in the others a
number is hidden in the first two thirds, and their last tokens ask for it.  All of them run at once.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.parts.forced import follow
from bench.parts.hidden import ASK, TEXT, Request, fact_and_digits
from evaluation.server import Server
from evaluation.traffic import PAGE_TOKENS
from evaluation.watch import Watch
from kvir.calibration.harness import Harness
from kvir.calibration.samples import token_ids

PROMPT_TOKENS, ANSWER_TOKENS = 64, 2000
COUNTED_TOKENS = ANSWER_TOKENS - 512  # before that, little has been dropped


@dataclass(frozen=True)
class Long:
    """Of one policy."""

    losses: tuple[float, ...]  # nats a token, by answer
    found: tuple[bool, ...]  # numbers of which every digit was the likeliest token
    digits: float  # share of digits
    rows: float  # that selections left, the mean over looks, requests and units; 0: none ran


def requests(harness: Harness, count: int) -> list[Request]:
    """`count` answers of text, and as many that hide a number."""
    ids, ask = token_ids(harness, TEXT.read_text(encoding="utf-8")), token_ids(harness, ASK)
    total, rng = PROMPT_TOKENS + ANSWER_TOKENS, random.Random(2)
    step = (len(ids) - total) // max(1, count - 1)
    made: list[Request] = []
    for index in range(count):
        text = ids[index * step :][:total]
        made.append(Request("loss", tuple(text[:PROMPT_TOKENS]), tuple(text[PROMPT_TOKENS:]), COUNTED_TOKENS))
        fact, digits = fact_and_digits(harness, rng)
        answer = text[PROMPT_TOKENS : total - len(fact) - len(ask) - len(digits)]
        at = round(len(answer) * (0.05 + 0.6 * index / max(1, count - 1)))
        hiding = [*answer[:at], *fact, *answer[at:], *ask, *digits]
        made.append(Request("hidden", tuple(text[:PROMPT_TOKENS]), tuple(hiding), len(digits)))
    return made


def measure(server: Server, asked: Sequence[Request], folder: Path) -> Long:
    """All answers at once."""
    with Watch(server, 2.0) as watch, ThreadPoolExecutor(len(asked)) as pool:
        forced = list(pool.map(lambda r: follow(server, r.prompt, r.after, folder), asked))
    losses, found, digits = [], [], []
    for request, one in zip(asked, forced, strict=True):
        if request.kind == "loss":
            losses.append(one.loss(request.counted))
            continue
        right = one.right(request.after, request.counted)
        found.append(all(right))
        digits.append(statistics.fmean(right))
    left = [_rows_of_units(r) for look in watch.seen for r in look["running"] if r["selected"]]
    rows = statistics.fmean(statistics.fmean(units) for units in left) if left else 0.0
    return Long(tuple(losses), tuple(found), statistics.fmean(digits), rows)


def _rows_of_units(running: dict[str, Any]) -> list[int]:
    """What the last selection left of each unit; a unit that never selects holds every row."""
    selected = running["selected"]
    every = running["pages"] * PAGE_TOKENS
    return [rows if at else every for rows, at in zip(selected["rows"], selected["at"], strict=True)]
