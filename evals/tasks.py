"""Tasks over long contexts with answers that can be checked, made from a text and a seed (after RULER).

A task makes the lines that must stand in a context, and fills the rest with the text.  Contexts come in
pieces, so that they can be sized to a number of tokens: more filler, and the answer stays the same.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvir.evals.prompts import Prompt
from kvir.evals.words import NOISE, keys, numbers, words

NEEDLES = 4  # hidden per context where a task hides several
CHAIN = 4  # variables of a chain
DISTRACTORS = 7  # other keys of a multi-key context


@dataclass(frozen=True)
class Draft:
    """A context that can be of any length: `place` puts what must be found among the filler."""

    instruction: str
    question: str
    lead: str
    references: tuple[str, ...]
    rule: Literal["all", "any"]
    place: Callable[[Sequence[str]], str]  # filler -> context
    filler: Sequence[str]  # as much as there is; the first of it is used

    def prompt(self, pieces: int) -> Prompt:
        """With so many pieces of the filler."""
        return Prompt(self.instruction, self.place(self.filler[:pieces]), self.question, self.lead)


@dataclass(frozen=True)
class Item:
    """One question about one context."""

    task: str
    tokens: int  # asked for
    number: int
    prompt: Prompt
    references: tuple[str, ...]
    rule: Literal["all", "any"]

    def score(self, answer: str) -> float:
        """RULER's measure: the share of the references in the answer; for `any` 1 if it has one."""
        text = _plain(answer)
        found = [_plain(reference) in text for reference in self.references]
        return float(any(found)) if self.rule == "any" else sum(found) / len(found)


def _plain(text: str) -> str:
    """Lower case, digits without separators, single spaces."""
    return re.sub(r"\s+", " ", re.sub(r"(?<=\d),(?=\d{3})", "", text)).strip().lower()


INSTRUCTION = (
    "Read the text and answer the question at the end. Answer from the text alone, in one short sentence."
)
MEMORISE = "A number is written down for some keys. " + INSTRUCTION


def paragraphs(text: str) -> list[str]:
    """Lines that say something."""
    return [line.strip() for line in text.splitlines() if len(line.split()) >= 8]


def _scattered(rng: random.Random, lines: Sequence[str]) -> Callable[[Sequence[str]], str]:
    """Puts lines at depths that do not depend on the length: never at the very ends."""
    depths = sorted((i + rng.random()) / len(lines) for i in range(len(lines)))

    def place(filler: Sequence[str]) -> str:
        parts = list(filler)
        for depth, line in reversed(list(zip(depths, lines, strict=True))):
            parts.insert(min(max(1, round(depth * len(parts))), max(len(parts) - 1, 0)), line)
        return "\n".join(parts)

    return place


def _hidden(key: str, value: str) -> str:
    return f"One of the special magic numbers for {key} is: {value}."


def _needles(
    rng: random.Random,
    filler: Sequence[str],
    facts: Sequence[tuple[str, str]],
    question: str,
    lead: str,
    answers: Sequence[str],
) -> Draft:
    lines = [_hidden(key, value) for key, value in facts]
    rng.shuffle(lines)
    return Draft(MEMORISE, question, lead, tuple(answers), "all", _scattered(rng, lines), filler)


def _one(key: str) -> tuple[str, str]:
    """Question for the number of a key, and how an answer begins."""
    what = f"the special magic number for {key}"
    return f"What is {what}?", f"T{what[1:]} is"


def passkey(rng: random.Random, filler: Sequence[str]) -> Draft:
    """One number in noise (RULER's first needle)."""
    (key,), (value,) = keys(rng, 1), numbers(rng, 1)
    noise = [NOISE] * (len(filler) * 8 + 64)
    return _needles(rng, noise, [(key, value)], *_one(key), [value])


def single(rng: random.Random, filler: Sequence[str]) -> Draft:
    """One number in the text."""
    (key,), (value,) = keys(rng, 1), numbers(rng, 1)
    return _needles(rng, filler, [(key, value)], *_one(key), [value])


def multi_key(rng: random.Random, filler: Sequence[str]) -> Draft:
    """One number among those of other keys."""
    facts = list(zip(keys(rng, 1 + DISTRACTORS), numbers(rng, 1 + DISTRACTORS), strict=True))
    key, value = rng.choice(facts)
    return _needles(rng, filler, facts, *_one(key), [value])


def multi_value(rng: random.Random, filler: Sequence[str]) -> Draft:
    """All numbers of one key."""
    (key,), values = keys(rng, 1), numbers(rng, NEEDLES)
    question = f"What are all {NEEDLES} special magic numbers for {key}? List them all."
    lead = f"The {NEEDLES} special magic numbers for {key} are"
    return _needles(rng, filler, [(key, value) for value in values], question, lead, values)


def multi_query(rng: random.Random, filler: Sequence[str]) -> Draft:
    """The numbers of several keys at once."""
    names, values = keys(rng, NEEDLES), numbers(rng, NEEDLES)
    what = f"he special magic numbers for {', '.join(names[:-1])} and {names[-1]}"
    question, lead = f"What are t{what}? List them all.", f"T{what} are"
    return _needles(rng, filler, list(zip(names, values, strict=True)), question, lead, values)


def variables(rng: random.Random, filler: Sequence[str]) -> Draft:
    """Which variables hold a value, through a chain of assignments."""
    names = [word.upper() for word in words(rng, CHAIN + 1)]
    (value,) = numbers(rng, 1)
    lines = [f"VAR {names[0]} = {value}"]
    lines += [f"VAR {new} = VAR {old}" for old, new in itertools.pairwise(names)]
    question = (
        f"Which variables have the value {value}, directly or through other variables? List all their names."
    )
    instruction = "The text hides assignments to variables. " + INSTRUCTION
    lead = f"The variables that have the value {value} are"
    return Draft(instruction, question, lead, tuple(names), "all", _scattered(rng, lines), filler)


def common_words(rng: random.Random, filler: Sequence[str]) -> Draft:
    """The words that stand most often in a numbered list."""
    common = words(rng, 5)
    rare = [word for word in words(rng, 4000) if word not in common]

    def place(units: Sequence[str]) -> str:
        # each unit is ten words: half are common ones, the others appear at most twice
        size = len(units)
        listed = [word for word in common for _ in range(size)] + [
            rare[i // 2 % len(rare)] for i in range(5 * size)
        ]
        random.Random(size).shuffle(listed)
        return " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1))

    instruction = "Below is a numbered list of words; some appear more often than others. " + INSTRUCTION
    question, lead = "What are the 5 most common words of the list?", "The 5 most common words are"
    return Draft(instruction, question, lead, tuple(common), "all", place, ["ten words"] * 4000)


def frequent_words(rng: random.Random, filler: Sequence[str]) -> Draft:
    """The three most frequent words of a coded text whose frequencies fall like 1/rank^2."""
    coded = words(rng, 60)

    def place(units: Sequence[str]) -> str:
        size = 10 * len(units)
        total = sum(1 / rank**2 for rank in range(1, len(coded) + 1))
        counts = [max(1, round(size / rank**2 / total)) for rank in range(1, len(coded) + 1)]
        text = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
        random.Random(size).shuffle(text)
        return " ".join(text)

    instruction = "The text is coded; ignore what it might mean. " + INSTRUCTION
    question, lead = "What are the 3 most frequent words of the coded text?", "The 3 most frequent words are"
    return Draft(instruction, question, lead, tuple(coded[:3]), "all", place, ["ten words"] * 4000)


_NUMBER = re.compile(r"(?<![\d.,])\d{2,4}(?![\d,.]*\d)")


def reading(rng: random.Random, filler: Sequence[str]) -> Draft:
    """Which number a sentence of the text has in the place of a gap.

    Raises ValueError when no sentence of the text has exactly one number.
    """
    sentences = [(i, s) for i, p in enumerate(filler) for s in re.split(r"(?<=[.!?]) ", p)]
    fit = [(i, s) for i, s in sentences if len(_NUMBER.findall(s)) == 1 and 8 <= len(s.split()) <= 40]
    if not fit:
        raise ValueError("the task `reading` needs a text with numbers in its sentences")
    index, sentence = rng.choice(fit)
    (number,) = _NUMBER.findall(sentence)
    gap = _NUMBER.sub("____", sentence)
    others = [p for i, p in enumerate(filler) if i != index and number not in p]
    question = f"Which number stands in the text where this sentence has a gap? {gap}"
    lead = "The number is"
    return Draft(INSTRUCTION, question, lead, (number,), "any", _scattered(rng, [filler[index]]), others)


Task = Callable[[random.Random, Sequence[str]], Draft]
TASKS: dict[str, Task] = {
    "passkey": passkey,
    "single": single,
    "multi-key": multi_key,
    "multi-value": multi_value,
    "multi-query": multi_query,
    "variables": variables,
    "common-words": common_words,
    "frequent-words": frequent_words,
    "reading": reading,
}
GROUPS: dict[str, tuple[str, ...]] = {
    "needles": ("passkey", "single", "multi-key", "multi-value", "multi-query"),
    "all": tuple(TASKS),
}
NEEDS_TEXT = frozenset({"single", "multi-key", "multi-value", "multi-query", "variables", "reading"})


def make(
    task: str, tokens: int, number: int, seed: int, text: Sequence[str], count: Callable[[Prompt], int]
) -> Item:
    """The `number`-th item of a task, its prompt as long as fits in `tokens`.

    `count` gives the tokens of a prompt.  The same seed, task and number give the same facts at every length.

    Raises:
        ValueError: the text is too short, or `tokens` hold not even the facts.
    """
    rng = random.Random(f"{seed} {task} {number}")
    start = rng.randrange(len(text)) if text else 0
    draft = TASKS[task](rng, [*text[start:], *text[:start]])

    def size(units: int) -> int:
        return count(draft.prompt(units))

    low, high = 2, 4  # the largest count of fillers that fits lies in [low, high)
    if size(low) > tokens:
        raise ValueError(f"{tokens} tokens are too few for the task `{task}`")
    while high < len(draft.filler) and size(high) <= tokens:
        low, high = high, high * 2
    high = min(high, len(draft.filler) + 1)
    if high > len(draft.filler) and size(len(draft.filler)) < 0.8 * tokens:
        raise ValueError(f"the text is too short for a context of {tokens} tokens: give a longer --text")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if size(middle) <= tokens else (low, middle)
    return Item(task, tokens, number, draft.prompt(low), draft.references, draft.rule)
