"""A plan as masks in transformers: needles, the question in sight or not, and loss after a context."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.parts.answers import held_out_paragraphs
from kvir.calibration.samples import pieces, token_ids
from kvir.evals.answers import Local
from kvir.evals.command import most_tokens, prompt_counter
from kvir.evals.prompts import Form
from kvir.evals.tasks import make

CONTINUED_TOKENS = 128


@dataclass(frozen=True)
class Quality:
    """Of one plan."""

    aware: float  # share of the needles that are found with the question in the prompt
    agnostic: float  # and when it comes after the rows were dropped
    loss: float  # nats per token after the context


def quality(model: Path, plan: Path | None, context_tokens: int, needles: int, texts: int) -> Quality:
    """One needle a context, in held-out text; the loss over 128 tokens after contexts of held-out text."""
    local, text = Local(model, plan), held_out_paragraphs()
    scores: dict[bool, float] = {}  # by whether the question is out of sight
    for form in (Form(), Form(agnostic=True)):
        count = prompt_counter(str(model), form)
        total = 0.0
        for number in range(needles):
            most = most_tokens("single")
            item = make("single", context_tokens - most, number, 0, text, count)
            total += item.score(local.answer(form.turns(item.prompt), most).text)
        scores[form.agnostic] = total / needles
    ids = token_ids(local.harness, "\n".join(text))
    continued = pieces(local.harness, ids, context_tokens + CONTINUED_TOKENS, texts)
    losses = [local.loss(piece, context_tokens) for piece in continued]
    return Quality(scores[False], scores[True], sum(losses) / len(losses))
