"""Who answers: an OpenAI-compatible server, or a model in this process whose attention obeys a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvir.calibration.candidates import FULL, Candidate
from kvir.evals.prompts import Turn, turn_ids

if TYPE_CHECKING:
    from torch import Tensor

    from kvir.calibration.harness import Attention
    from kvir.calibration.interface import AttentionCall

TIMEOUT_S = 1800.0


class EvalError(Exception):
    """The evaluation cannot go on; the text says why."""


@dataclass(frozen=True)
class Answer:
    text: str
    prompt_tokens: int


class Answerer(Protocol):
    """Answers greedily: a chat in full, a text to the end of the line."""

    name: str

    def answer(self, turns: Sequence[Turn], most_tokens: int) -> Answer:
        """The answer to the last of `turns`; each holds all that is said up to then."""
        ...


class Server:
    """A server with `/v1/chat/completions` and `/v1/completions`."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        """Raises EvalError when nothing answers there."""
        import httpx

        self.name = url
        base = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=base, headers=headers, timeout=TIMEOUT_S, trust_env=False)
        self.model = str(self._call("GET", "/v1/models", None)["data"][0]["id"])

    def answer(self, turns: Sequence[Turn], most_tokens: int) -> Answer:
        for turn in turns[:-1]:  # the server reads the context before it can know the question
            self._complete(turn, 1)
        return self._complete(turns[-1], most_tokens)

    def _complete(self, turn: Turn, most_tokens: int) -> Answer:
        body = {"model": self.model, "temperature": 0, "max_tokens": most_tokens}
        if isinstance(turn, str):
            found = self._call("POST", "/v1/completions", {**body, "prompt": turn, "stop": "\n"})
            text = found["choices"][0]["text"]
        else:
            found = self._call("POST", "/v1/chat/completions", {**body, "messages": turn})
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
        self.harness = Harness(folder, device=device, dtype=getattr(torch, dtype))
        self._prefill = self._decode = {
            layer.layer_id: [FULL] * layer.kv_heads for layer in self.harness.facts.layers
        }
        if plan is not None:
            self._prefill, self._decode = retained(folder, plan)

    def answer(self, turns: Sequence[Turn], most_tokens: int) -> Answer:
        import torch
        from transformers import StoppingCriteriaList

        from kvir.calibration.samples import common_length

        tokenizer, plain = self.harness.tokenizer, isinstance(turns[-1], str)
        whole = turn_ids(tokenizer, turns[-1])
        # what a first turn has read is cut before the second begins
        first = turn_ids(tokenizer, turns[0], asks=False) if len(turns) > 1 else whole
        attention = self._attention(common_length(first, whole))
        ids = torch.tensor([whole], device=self.harness.device)

        def line_ends(made: Any, scores: Any, **_: Any) -> torch.Tensor:
            return torch.tensor([plain and "\n" in tokenizer.decode(made[0, -1])], device=made.device)

        with torch.no_grad(), self.harness.calls_go_to(attention):
            out = self.harness.model.generate(
                ids,
                max_new_tokens=most_tokens,
                do_sample=False,
                pad_token_id=tokenizer.eos_token_id,
                stopping_criteria=StoppingCriteriaList([line_ends]),
            )
        text: str = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        return Answer(text.split("\n")[0] if plain else text, ids.shape[1])

    def loss(self, ids: Sequence[int], start: int) -> float:
        """Mean nats per token of `ids[start:]`; what comes before it is the prompt."""
        hidden = self.harness.hidden(ids, self._attention(start))
        return self.harness.loss(hidden, ids, start - 1)

    def _attention(self, prompt_tokens: int) -> Attention:
        """Queries at positions below `prompt_tokens` obey the prefill phase, later ones decode."""
        from kvir.calibration.attend import attend_phases

        def attention(call: AttentionCall) -> Tensor:
            prefill, decode = self._prefill[call.layer_id], self._decode[call.layer_id]
            return attend_phases(call, prefill, decode, prompt_tokens)

        return attention


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
