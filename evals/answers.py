"""Who answers: an OpenAI-compatible server, or a model in this process whose attention obeys a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypedDict

from kvir.calibration.candidates import FULL, Candidate

READ = "I will ask about this text next."
ACKNOWLEDGED = "I have read the text."
TIMEOUT_S = 1800.0


class Message(TypedDict):
    role: str
    content: str


class EvalError(Exception):
    """The evaluation cannot go on; the text says why."""


@dataclass(frozen=True)
class Answer:
    text: str
    prompt_tokens: int


class Answerer(Protocol):
    """Answers chats greedily."""

    name: str

    def answer(self, turns: Sequence[Sequence[Message]], most_tokens: int) -> Answer:
        """The answer to the last of `turns`; each is a whole chat that goes on from the one before."""
        ...


def chat(instruction: str, context: str, question: str, *, agnostic: bool) -> list[list[Message]]:
    """The chats of an item: one with all in it; or the context first, and the question in a second turn."""
    if not agnostic:
        return [[{"role": "user", "content": f"{instruction}\n\n{context}\n\n{question}"}]]
    first: Message = {"role": "user", "content": f"{instruction}\n\n{context}\n\n{READ}"}
    return [
        [first],
        [first, {"role": "assistant", "content": ACKNOWLEDGED}, {"role": "user", "content": question}],
    ]


class Server:
    """A server with `/v1/chat/completions`."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        """Raises EvalError when nothing answers there."""
        import httpx

        self.name = url
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT_S, trust_env=False)
        self.model = str(self._call("GET", "/v1/models", None)["data"][0]["id"])

    def answer(self, turns: Sequence[Sequence[Message]], most_tokens: int) -> Answer:
        for chat in turns[:-1]:  # the server reads the context before it can know the question
            self._complete(chat, 1)
        return self._complete(turns[-1], most_tokens)

    def _complete(self, messages: Sequence[Message], most_tokens: int) -> Answer:
        body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": most_tokens,
        }
        found = self._call("POST", "/v1/chat/completions", body)
        text = found["choices"][0]["message"]["content"] or ""
        return Answer(text, int(found.get("usage", {}).get("prompt_tokens", 0)))

    def _call(self, method: str, path: str, body: object) -> Any:
        import httpx

        try:
            response = self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EvalError(f"{self.name}: {error}") from None
        if response.is_error:
            raise EvalError(f"{self.name}{path}: HTTP {response.status_code}: {response.text[:300]}")
        return response.json()


class Local:
    """A model in this process.  A policy acts as masks: quality as served, memory as for full KV."""

    def __init__(
        self, folder: Path, plan: Path | None, *, device: str = "cpu", dtype: str = "float32"
    ) -> None:
        """Raises PolicyError for a plan that does not fit the model, EvalError for one that scores rows."""
        import torch

        from kvir.calibration.harness import Harness

        self.name = f"{folder.name} with {plan.name}" if plan else f"{folder.name}, full KV"
        self._harness = Harness(folder, device=device, dtype=getattr(torch, dtype))
        self._prefill = self._decode = {
            layer.layer_id: [FULL] * layer.kv_heads for layer in self._harness.facts.layers
        }
        if plan is not None:
            self._prefill, self._decode = retained(folder, plan)

    def answer(self, turns: Sequence[Sequence[Message]], most_tokens: int) -> Answer:
        import torch

        from kvir.calibration.attend import attend_phases
        from kvir.calibration.interface import AttentionCall
        from kvir.calibration.samples import common_length

        tokenizer = self._harness.tokenizer
        whole = self._ids(turns[-1])
        # what a first turn has read is cut before the second begins
        first = self._ids(turns[0], answered=True) if len(turns) > 1 else whole
        prompt_tokens = common_length(first, whole)
        ids = torch.tensor([whole], device=self._harness.device)

        def attention(call: AttentionCall) -> torch.Tensor:
            prefill, decode = self._prefill[call.layer_id], self._decode[call.layer_id]
            return attend_phases(call, prefill, decode, prompt_tokens)

        with torch.no_grad(), self._harness.calls_go_to(attention):
            out = self._harness.model.generate(
                ids, max_new_tokens=most_tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
            )
        return Answer(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), ids.shape[1])

    def _ids(self, messages: Sequence[Message], *, answered: bool = False) -> list[int]:
        tokenizer, chat = self._harness.tokenizer, list(messages)
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=not answered, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False).input_ids)


Retained = dict[int, list[Candidate]]  # layer_id -> what each KV head keeps


def retained(folder: Path, plan: Path) -> tuple[Retained, Retained]:
    """What a static policy keeps in prefill and in decode.

    Raises:
        PolicyError: the policy does not fit the model.
        EvalError: it selects rows by a score, which only a server executes.
    """
    from kvir.lowering.model_facts import load_model
    from kvir.lowering.pipeline import lower_to
    from kvir.lowering.stages import BudgetedPolicy, Retention
    from kvir.policy_ir import PolicyError, read_file

    model = load_model(folder)
    policy, report, _ = read_file(plan)
    if policy is None:
        raise PolicyError(report)
    stage = lower_to("budget", policy, model, dtype=model.dtype, report=report)
    report.raise_if_errors()
    assert isinstance(stage, BudgetedPolicy)

    def one(kept: Retention) -> Candidate:
        if kept.selection is not None:
            raise EvalError(
                f"{plan} selects rows by a score, which masks cannot show: give the --url of a server"
            )
        if kept.recent_tokens is None:
            return FULL
        return Candidate(kept.recent_tokens, kept.sink_tokens)

    ids = [layer.layer_id for layer in model.layers]
    prefill, decode = (
        {i: [one(kept) for kept in row] for i, row in zip(ids, table, strict=True)}
        for table in (stage.prefill, stage.decode)
    )
    return prefill, decode


def evicted_share(kept: Retained, sizes: dict[int, int], tokens: int) -> float:
    """Share of a prompt's rows that are gone once it has been read, weighted by the size of a row."""
    whole = sum(tokens * sizes[i] * len(row) for i, row in kept.items())
    there = sum(one.rows(tokens) * sizes[i] for i, row in kept.items() for one in row)
    return 1 - there / whole
