"""How a question is put: as a chat, or, for models that know no chats, as a text to go on with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

READ = "I will ask about this text next."
ACKNOWLEDGED = "I have read the text."


class Message(TypedDict):
    role: str
    content: str


Turn = str | list[Message]  # what is sent at once: a text, or a whole chat


@dataclass(frozen=True)
class Prompt:
    """The parts of a question about a long context."""

    instruction: str
    context: str
    question: str
    lead: str  # how the answer begins, where the model must be led: `The number is`


@dataclass(frozen=True)
class Form:
    """chat: for a chat template; else a plain text that ends in the beginning of the answer.
    agnostic: the context is sent first, and the question with it in a second turn.
    """

    chat: bool = True
    agnostic: bool = False

    def turns(self, prompt: Prompt) -> list[Turn]:
        """One turn, or two; the second goes on from the first."""
        read = f"{prompt.instruction}\n\n{prompt.context}\n\n"
        if not self.chat:
            whole = f"{read}Question: {prompt.question}\nAnswer: {prompt.lead}"
            return [read, whole] if self.agnostic else [whole]
        if not self.agnostic:
            return [[{"role": "user", "content": read + prompt.question}]]
        first: Message = {"role": "user", "content": read + READ}
        answered: Message = {"role": "assistant", "content": ACKNOWLEDGED}
        return [[first], [first, answered, {"role": "user", "content": prompt.question}]]


def turn_ids(tokenizer: Any, turn: Turn, *, asks: bool = True) -> list[int]:
    """The tokens of a turn, as a server makes them.  `asks`: a chat's answer is to follow."""
    if isinstance(turn, str):
        return list(tokenizer(turn, verbose=False).input_ids)
    text = tokenizer.apply_chat_template(list(turn), add_generation_prompt=asks, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
