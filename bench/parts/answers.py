"""Answers of servers to a set of questions, kept in a file, so that a long run goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec

from evaluation.server import Launch, serve
from kvir.evals.answers import Answer
from kvir.evals.answers import Server as Client
from kvir.evals.command import most_tokens, prompt_counter
from kvir.evals.prompts import Form, Turn
from kvir.evals.tasks import GROUPS, Item, make, paragraphs

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "out/headwise/answers.jsonl"
TEXT = ROOT / "data/wikipedia_valid.txt"
CALIBRATED_SHARE = 0.6  # of the text, from its start: what the example plans were made of
AT_ONCE = 4


class Line(msgspec.Struct, frozen=True):
    """One answer in the file."""

    who: str
    asked: str
    text: str
    prompt_tokens: int


@dataclass(frozen=True)
class Question:
    """An item of an evaluation, ready to be sent."""

    item: Item
    tokens: int  # the length that was asked for
    turns: tuple[Turn, ...]

    @property
    def name(self) -> str:
        """Of everything that is sent."""
        return hashlib.sha256(json.dumps(self.turns).encode()).hexdigest()[:24]


def held_out_paragraphs() -> list[str]:
    """Text that the calibration of the examples has not seen."""
    text = paragraphs(TEXT.read_text(encoding="utf-8"))
    return text[round(CALIBRATED_SHARE * len(text)) :]


def needles(model: Path, form: Form, lengths: Sequence[int], per_task: int) -> list[Question]:
    """The five needle tasks over held-out text."""
    text, count = held_out_paragraphs(), prompt_counter(str(model), form)
    asked = [
        (make(task, length - most_tokens(task), number, 0, text, count), length)
        for length in lengths
        for number in range(per_task)
        for task in GROUPS["needles"]
    ]
    return [Question(item, length, tuple(form.turns(item.prompt))) for item, length in asked]


class Answers:
    """What one server answers: given already, or still to be given."""

    def __init__(self, launch: Launch) -> None:
        plan = hashlib.sha256(launch.kv_ir.read_bytes()).hexdigest()[:16] if launch.kv_ir else "stock"
        self.who = f"{launch.model.name} {launch.dtype} {plan}"
        self.launch = launch
        self._writing = threading.Lock()

    def known(self) -> dict[str, Answer]:
        """By the name of the question."""
        if not KEPT.exists():
            return {}
        lines = msgspec.json.Decoder(Line).decode_lines(KEPT.read_bytes())
        return {line.asked: Answer(line.text, line.prompt_tokens) for line in lines if line.who == self.who}

    def ask(self, questions: Sequence[Question], minutes: float, say: Callable[[str], None]) -> int:
        """Ask what has no answer yet, for so many minutes; how many are left.

        Raises:
            ServerError: the server does not start.
            EvalError: it does not answer.
        """
        deadline = time.monotonic() + 60 * minutes
        known = self.known()
        left = [question for question in questions if question.name not in known]
        if not left:
            return 0
        with serve(self.launch) as server, ThreadPoolExecutor(AT_ONCE) as pool:
            client = Client(server.url)

            def one(question: Question) -> bool:
                if time.monotonic() > deadline:
                    return False
                if question.name in self.known():  # by another process, that began at the other end
                    return True
                self._keep(question, client.answer(question.turns, most_tokens(question.item.task)))
                say(f"{self.who}: {question.item.task}, {question.tokens} tokens, {question.item.number}")
                return True

            return len(left) - sum(pool.map(one, left))

    def _keep(self, question: Question, answer: Answer) -> None:
        line = Line(self.who, question.name, answer.text, answer.prompt_tokens)
        with self._writing:
            KEPT.parent.mkdir(parents=True, exist_ok=True)
            with KEPT.open("ab") as file:
                file.write(msgspec.json.encode(line) + b"\n")
