"""Prompts of text that no plan was calibrated on: text that goes on, and text that hides a number.

The three prompts of one number begin alike, so a server with a prefix cache reads most of them once.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from evaluation.needles import NEEDLE
from kvir.calibration.harness import Harness
from kvir.calibration.samples import token_ids

TEXT = Path(__file__).resolve().parents[2] / "data/wikitext2_next.txt"  # plans are made of the text before it
PROMPT_TOKENS, AFTER_TOKENS = 1024, 128
ASK = (
    "\nQuestion: What is the secret access code of the vault?\nAnswer: The secret access code of the vault is"
)
KINDS = ("loss", "aware", "agnostic")


@dataclass(frozen=True)
class Request:
    """A prompt and what is said to follow it."""

    kind: str
    prompt: tuple[int, ...]
    after: tuple[int, ...]
    counted: int  # of the last tokens of `after`


def requests(harness: Harness, count: int) -> list[Request]:
    """`count` of each kind; the three of a number stand together.

    `loss`: text, and the text that follows.  `agnostic`: a number hidden in the text, the question after it.
    `aware`: the question ends the prompt; its last token comes after, so that the token before the first
    digit is read with the rows that were kept, too.
    """
    ids, ask = token_ids(harness, TEXT.read_text(encoding="utf-8")), token_ids(harness, ASK)
    rng = random.Random(1)
    room = (len(ids) - PROMPT_TOKENS - AFTER_TOKENS) // max(1, count - 1)
    made: list[Request] = []
    for index in range(count):
        fact, digits = fact_and_digits(harness, rng)
        text = ids[index * room :][: PROMPT_TOKENS + AFTER_TOKENS]
        most = PROMPT_TOKENS - len(fact) - len(ask)  # of the shortest of the three
        at = round(most * (0.05 + 0.9 * index / max(1, count - 1)))
        hiding = [*text[:at], *fact, *text[at:]][:PROMPT_TOKENS]
        shorter = hiding[: PROMPT_TOKENS - len(ask) + 1]
        made += [
            _request("agnostic", hiding, [*ask, *digits], len(digits)),
            _request("aware", [*shorter, *ask[:-1]], [ask[-1], *digits], len(digits)),
            _request("loss", text[:PROMPT_TOKENS], text[PROMPT_TOKENS:], AFTER_TOKENS - 1),
        ]
    return made


def fact_and_digits(harness: Harness, rng: random.Random) -> tuple[list[int], list[int]]:
    """A number of five digits: the paragraph that hides it, and how an answer says it."""
    number = str(rng.randrange(10_000, 100_000))
    fact = token_ids(harness, "\n" + NEEDLE.format(number=number) + "\n")
    return fact, token_ids(harness, f" {number}")


def _request(kind: str, prompt: Sequence[int], after: Sequence[int], counted: int) -> Request:
    return Request(kind, tuple(prompt), tuple(after), counted)


def digest(asked: Sequence[Request]) -> str:
    """Of all that is asked."""
    text = msgspec.json.encode([(r.kind, r.prompt, r.after) for r in asked])
    return hashlib.sha256(text).hexdigest()[:16]
