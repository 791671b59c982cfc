"""Long-context questions with one right answer: a number hidden in encyclopedia text.

The haystack is made of whole paragraphs of `data/wikipedia_valid.txt`; the needle is a sentence of its own
between two of them; the question comes last, in chat form.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypedDict

TEXT = Path(__file__).resolve().parent.parent / "data" / "wikipedia_valid.txt"

SYSTEM = (
    "You answer questions about the text that the user gives you. Read the whole text, find what is asked, "
    "and answer in one short sentence. The text was put together from many sources, so neighbouring "
    "paragraphs may have nothing to do with each other; do not summarise them. If a number is asked for, "
    "give exactly the digits that stand in the text, without a separator and without any explanation. Do not "
    "guess and do not calculate: every number that is asked for stands in the text as it is."
)
NEEDLE = "The secret access code of the vault is {number}. Remember it."
QUESTION = "What is the secret access code of the vault? Answer with the number."
ANSWER_TOKENS = 24  # more than the sentence that a model answers with


class Message(TypedDict):
    role: str
    content: str


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Needle:
    """One question: the chat to send, and the number that the answer must contain."""

    messages: tuple[Message, ...]
    number: str
    depth: float  # where the number is hidden: 0 at the start of the text, 1 at its end

    def found_in(self, answer: str) -> bool:
        """Whether an answer names the number, written with or without separators."""
        return self.number in answer.replace(",", "").replace(" ", "")


@cache
def paragraphs() -> tuple[str, ...]:
    return tuple(TEXT.read_text(encoding="utf-8").splitlines())


def make(
    tokenizer: Tokenizer, count: int, tokens: int, *, seed: int = 0, system: str = SYSTEM
) -> list[Needle]:
    """`count` questions over disjoint haystacks of at least `tokens` tokens, at evenly spread depths.

    Raises ValueError when the text is too short for that many.
    """
    rng = random.Random(seed)
    left = iter(paragraphs())
    made: list[Needle] = []
    for index in range(count):
        haystack: list[str] = []
        size = 0
        while size < tokens:
            paragraph = next(left, None)
            if paragraph is None:
                raise ValueError(f"{TEXT.name} is too short for {count} haystacks of {tokens} tokens")
            haystack.append(paragraph)
            size += len(tokenizer.encode(paragraph, add_special_tokens=False))
        depth = (index + 0.5) / count
        number = str(rng.randrange(10_000, 100_000))
        # Never first or last: at the ends sinks and a short window would be enough.
        place = min(max(1, round(depth * len(haystack))), len(haystack) - 1)
        haystack.insert(place, NEEDLE.format(number=number))
        made.append(Needle(_chat(system, haystack), number, depth))
    return made


def _chat(system: str, haystack: Sequence[str]) -> tuple[Message, ...]:
    user = "\n\n".join([*haystack, QUESTION])
    return ({"role": "system", "content": system}, {"role": "user", "content": user})


def prompt_ids(tokenizer: Any, needle: Needle) -> list[int]:
    """The chat as the token ids that a chat server makes of it."""
    text = tokenizer.apply_chat_template(list(needle.messages), add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def shared_prefix(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The tokens that all prompts begin with: the system prompt and the chat's frame around it."""
    columns = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    return [column[0] for column in columns]
