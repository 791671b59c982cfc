"""Token sequences to calibrate on: consecutive pieces of a text, and texts with facts to find again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvir.calibration.harness import CalibrationError, Harness

Kind = Literal["text", "retrieval"]


@dataclass(frozen=True)
class Sample:
    """One sequence and the query positions at which outputs are compared, ascending.

    Queries before `prompt_tokens` see everything: 0 where a policy holds in both phases, the first position
    compared where it holds in decode alone.
    """

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    kind: Kind = "text"
    prompt_tokens: int = 0


def token_ids(harness: Harness, text: str) -> list[int]:
    """The text alone, without special tokens."""
    return list(harness.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def pieces(harness: Harness, ids: Sequence[int], context_tokens: int, count: int) -> list[tuple[int, ...]]:
    """The first `count` pieces of exactly `context_tokens`, each with the tokenizer's prefix.

    Raises:
        CalibrationError: the text is too short.
    """
    prefix = tuple(harness.prefix_ids())
    size = context_tokens - len(prefix)
    if size < 2 or len(ids) < count * size:
        need, have = count * size, len(ids)
        raise CalibrationError(
            f"the text has {have} tokens left; {count} samples of {context_tokens} need {need}: "
            "give a longer text, or fewer or shorter samples"
        )
    return [(*prefix, *ids[i * size : (i + 1) * size]) for i in range(count)]


def query_positions(context_tokens: int, share: float, stride: int) -> tuple[int, ...]:
    """Every `stride`-th position of the last `share` of the context."""
    return tuple(range(round(context_tokens * (1 - share)), context_tokens, stride))


# Three kinds of fact, worded unlike each other and unlike the evaluation's needles.
FACTS = (
    ("The registration number of the {key} is {value}.", "What is the registration number of the {key}?"),
    ("In the ledger, {key} is entered under {value}.", "Under which number is {key} entered in the ledger?"),
    ("Those who ask for the {key} dial {value}.", "Which number does one dial for the {key}?"),
)
ANSWER = "\nQuestion: {question}\nAnswer: The number is {value}."
FIRST = ("old", "red", "northern", "silent", "grand", "small", "broken", "golden", "eastern", "hidden")
SECOND = ("bridge", "harbour", "mill", "theatre", "orchard", "tower", "library", "ferry", "garden", "station")
FACTS_PER_SAMPLE = 6


def retrieval_samples(
    harness: Harness, ids: Sequence[int], context_tokens: int, count: int, *, seed: int = 0
) -> list[Sample]:
    """Texts with numbers hidden at spread depths; the end asks for each and answers.  The query positions are
    those that predict the digits of the answers; the prompt ends where the questions begin.

    Raises:
        CalibrationError: the text is too short, or so is the context.
    """
    rng = random.Random(seed)
    prefix, made, used = harness.prefix_ids(), list[Sample](), 0
    for _ in range(count):
        keys = rng.sample([f"{a} {b}" for a in FIRST for b in SECOND], FACTS_PER_SAMPLE)
        values = [str(rng.randrange(10_000, 100_000)) for _ in keys]
        kinds = [FACTS[i % len(FACTS)] for i in range(len(keys))]
        told = [
            token_ids(harness, "\n" + fact.format(key=key, value=value) + "\n")
            for (fact, _), key, value in zip(kinds, keys, values, strict=True)
        ]
        tail, positions = list[int](), list[int]()
        for index in rng.sample(range(len(keys)), len(keys)):
            question = kinds[index][1].format(key=keys[index])
            before, after = ANSWER.format(question=question, value="\0").split("\0")
            answer = token_ids(harness, before + values[index])
            lead = common_length(token_ids(harness, before), answer)
            positions += range(len(tail) + lead - 1, len(tail) + len(answer) - 1)
            tail += answer + token_ids(harness, after)
        hay = context_tokens - len(prefix) - len(tail) - sum(map(len, told))
        if hay < len(told) or used + hay > len(ids):
            raise CalibrationError("too little text or context for the retrieval samples")
        text = list(ids[used : used + hay])
        used += hay
        # the last eighth stays without a fact: a window would hold it
        depths = [int(hay * 0.875 * (i + rng.random()) / len(told)) for i in range(len(told))]
        for depth, fact in sorted(zip(depths, told, strict=True), key=lambda pair: pair[0], reverse=True):
            text[depth:depth] = fact
        whole = [*prefix, *text, *tail]
        shift = len(whole) - len(tail)
        made.append(Sample(tuple(whole), tuple(p + shift for p in sorted(positions)), "retrieval", shift))
    return made


def asked_in_prompt(sample: Sample) -> Sample:
    """A retrieval sample whose prompt ends with the last question, just before its answer.

    The first digit is predicted by the prompt's last token, so the positions are those of the others.
    """
    first = len(sample.positions) - 1
    while first and sample.positions[first - 1] == sample.positions[first] - 1:
        first -= 1
    positions = sample.positions[first + 1 :] or sample.positions[first:]
    return replace(
        sample, ids=sample.ids[: positions[-1] + 1], positions=positions, prompt_tokens=positions[0]
    )


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
