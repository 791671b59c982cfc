"""The hidden numbers: whole, spread, found again, and different for every question."""

from __future__ import annotations

import pytest

from evaluation import needles
from evaluation.needles import Needle
from support import tiny_llama

COUNT, TOKENS = 4, 3_000  # bytes here: the tiny tokenizer has one token per byte


@pytest.fixture(scope="module")
def made() -> list[Needle]:
    return needles.make(tiny_llama.byte_tokenizer(), COUNT, TOKENS)


def test_every_chat_has_its_number_once_and_its_question_last(made: list[Needle]) -> None:
    assert len({needle.number for needle in made}) == COUNT
    for needle in made:
        system, user = needle.messages
        assert system["content"] == needles.SYSTEM
        assert user["content"].count(needle.number) == 1
        assert user["content"].endswith("\n\n" + needles.QUESTION)
        assert len(user["content"].encode()) > TOKENS


def test_depths_are_spread_and_never_at_an_end(made: list[Needle]) -> None:
    places = []
    for needle in made:
        paragraphs = needle.messages[1]["content"].split("\n\n")[:-1]
        place = next(i for i, paragraph in enumerate(paragraphs) if needle.number in paragraph)
        assert 0 < place < len(paragraphs) - 1
        places.append(place / len(paragraphs))
    assert places == sorted(places)
    assert places[0] < 0.35
    assert places[-1] > 0.65


def test_haystacks_are_disjoint(made: list[Needle]) -> None:
    seen: set[str] = set()
    for needle in made:
        haystack = {p for p in needle.messages[1]["content"].split("\n\n")[:-1] if needle.number not in p}
        assert not haystack & seen
        seen |= haystack


def test_same_seed_same_questions(made: list[Needle]) -> None:
    assert needles.make(tiny_llama.byte_tokenizer(), COUNT, TOKENS) == made
    others = needles.make(tiny_llama.byte_tokenizer(), COUNT, TOKENS, seed=1)
    assert [n.number for n in others] != [n.number for n in made]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ("The secret access code of the vault is 48213.", True),
        ("It is 48,213.", True),
        ("4 8 2 1 3", True),
        ("It is 4821.", False),
        ("It is 48214.", False),
        ("", False),
    ],
)
def test_answers(answer: str, found: bool) -> None:
    assert Needle(messages=(), number="48213", depth=0.5).found_in(answer) is found


def test_too_much_asked_of_the_text() -> None:
    with pytest.raises(ValueError, match="too short for 3 haystacks"):
        needles.make(tiny_llama.byte_tokenizer(), 3, 100_000)


def test_shared_prefix() -> None:
    assert needles.shared_prefix([[1, 2, 3], [1, 2, 4, 5], [1, 2]]) == [1, 2]
    assert needles.shared_prefix([[1], [2]]) == []
