"""Tasks: the answer stands in the context, the size is what was asked for, and a seed says it all."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from kvir.evals.prompts import Form, Prompt
from kvir.evals.tasks import NEEDS_TEXT, TASKS, Item, make, paragraphs

TEXT = paragraphs(
    "\n".join(
        f"In the year {1500 + i} the town number of people grew to about {'many' if i % 3 else 'few'} again."
        f" The river ran past the walls and the old mill until the great flood of spring {i % 7}."
        for i in range(400)
    )
)


def count(prompt: Prompt) -> int:
    return sum(len(part.split()) for part in (prompt.instruction, prompt.context, prompt.question))


def item(task: str, tokens: int = 600, number: int = 0, seed: int = 0) -> Item:
    return make(task, tokens, number, seed, TEXT, count)


@pytest.mark.parametrize("task", TASKS)
def test_size_and_determinism(task: str) -> None:
    for tokens in (400, 1500):
        made = item(task, tokens)
        assert 0.85 * tokens <= count(made.prompt) <= tokens
        assert made == item(task, tokens)
    assert item(task, 400).references == item(task, 1500).references, "the same facts at every length"
    assert item(task, number=1).references != item(task).references
    assert item(task, seed=1).references != item(task).references


@pytest.mark.parametrize("task", [task for task in TASKS if task not in ("common-words", "frequent-words")])
def test_the_answer_stands_in_the_context_once_and_not_in_the_question(task: str) -> None:
    for number in range(8):
        made = item(task, number=number)
        for reference in made.references:
            found = len(re.findall(rf"\b{reference}\b", made.prompt.context))
            # every variable of the chain but the last is read by the next
            assert 1 <= found <= (2 if task == "variables" else 1)
            assert reference not in made.prompt.question


def test_common_words_are_the_most_common() -> None:
    for number in range(5):
        made = item("common-words", 900, number)
        listed = re.findall(r"\d+\. (\w+)", made.prompt.context)
        assert {word for word, _ in Counter(listed).most_common(5)} == set(made.references)


def test_frequent_words_are_the_most_frequent() -> None:
    for number in range(5):
        made = item("frequent-words", 900, number)
        assert [word for word, _ in Counter(made.prompt.context.split()).most_common(3)] == list(
            made.references
        )


def test_scores() -> None:
    nothing = Prompt("", "", "", "")
    several = Item("t", 1, 0, nothing, ("12345", "67890"), "all")
    assert several.score("They are 12,345 and 67890.") == 1
    assert several.score("12345") == 0.5
    assert several.score("nothing") == 0
    either = Item("t", 1, 0, nothing, ("New  York", "NYC"), "any")
    assert either.score("in new york") == 1
    assert either.score("Boston") == 0


def test_too_short_is_an_error() -> None:
    with pytest.raises(ValueError, match="too few"):
        item("multi-key", 20)
    with pytest.raises(ValueError, match="longer --text"):
        make("single", 100_000, 0, 0, TEXT, count)
    assert "passkey" not in NEEDS_TEXT


@pytest.mark.parametrize("task", TASKS)
def test_a_plain_text_ends_in_the_beginning_of_the_answer(task: str) -> None:
    made = item(task)
    (text,) = Form(chat=False).turns(made.prompt)
    assert isinstance(text, str)
    assert text.endswith(f"Question: {made.prompt.question}\nAnswer: {made.prompt.lead}")
    assert made.prompt.context in text
    assert not any(reference in made.prompt.lead for reference in made.references)


def test_agnostic_forms_show_the_context_alone_first() -> None:
    prompt = Prompt("Read.", "The text.", "What?", "It is")
    read, whole = Form(chat=False, agnostic=True).turns(prompt)
    assert isinstance(read, str)
    assert isinstance(whole, str)
    assert whole.startswith(read)
    assert "What?" not in read
    first, second = Form(chat=True, agnostic=True).turns(prompt)
    assert isinstance(first, list)
    assert isinstance(second, list)
    assert second[:1] == first
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert "What?" not in first[0]["content"]
    assert second[-1]["content"] == "What?"
