"""The oracle: a policy executed as attention masks in Hugging Face transformers, float32, slow and obvious.

It shares nothing with the runtime but the retentions that the policy means: no kernels, no cache, no server.
A request that was served is teacher-forced through the model, every query seeing exactly the rows that its KV
head keeps, and the log-probabilities are compared.  Healthy serving agrees to about 5e-6; a foreign row
in a single head shows as 1e-3 and often leaves the tokens alone, so tokens are not enough.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from evaluation.server import Served
from kvir.lowering.stages import BudgetedPolicy, Retention

LOGPROB_TOLERANCE = 1e-4
TIE_TOLERANCE = 2e-5  # two candidates closer than this are a tie: either may be served
QUERY_CHUNK = 256  # bounds the memory of the scores: heads x chunk x length floats

LayerRetentions = Mapping[int, Sequence[Retention]]  # layer_id of the model -> one retention per KV head

Progress = Callable[[str], None]

_names = itertools.count()


@dataclass(frozen=True)
class Masks:
    """What each KV head of each attention layer keeps.  Layers that are not named keep every row."""

    prefill: LayerRetentions
    decode: LayerRetentions

    @staticmethod
    def of(budgeted: BudgetedPolicy) -> Masks:
        """The masks of a lowered policy, the model's own sliding windows included."""
        ids = [layer.layer_id for layer in budgeted.bound.model.layers]
        return Masks(
            prefill=dict(zip(ids, budgeted.prefill, strict=True)),
            decode=dict(zip(ids, budgeted.decode, strict=True)),
        )

    @staticmethod
    def full() -> Masks:
        """The identity policy."""
        return Masks(prefill={}, decode={})


def visible(retention: Retention | None, queries: Tensor, keys: Tensor) -> Tensor:
    """Which rows a query sees: bool [queries, keys] of positions.  None keeps every row."""
    seen = keys <= queries[:, None]
    if retention is None or retention.recent_tokens is None:
        return seen
    recent = keys > queries[:, None] - retention.recent_tokens
    return seen & (recent | (keys < retention.sink_tokens))


@dataclass(frozen=True)
class Forced:
    """What the oracle says about one request."""

    logprobs: Tensor  # [outputs, vocabulary], float32

    def argmax(self) -> tuple[int, ...]:
        return tuple(self.logprobs.argmax(-1).tolist())

    def of(self, output_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probability of each output token."""
        return tuple(self.logprobs.gather(1, torch.tensor(output_ids)[:, None])[:, 0].tolist())

    def top(self, count: int) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Per output token the best candidates: (token, log-probability), best first."""
        values, tokens = self.logprobs.topk(count, dim=-1)
        rows = zip(tokens.tolist(), values.tolist(), strict=True)
        return tuple(tuple(zip(ids, found, strict=True)) for ids, found in rows)


class Oracle:
    """A model in float32 whose attention obeys `masks`."""

    def __init__(self, model: Path, masks: Masks) -> None:
        name = f"kvir_oracle_{next(_names)}"
        # An unknown name makes transformers pass no mask of its own: the masks here are the only ones.
        ALL_ATTENTION_FUNCTIONS.register(name, self._attend)
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation=name
        ).eval()
        self.masks = masks
        self._prompt_tokens = 0

    @torch.no_grad()
    def force(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], *, prefill_tokens: int | None = None
    ) -> Forced:
        """Log-probabilities before each output token, given the prompt and the outputs before it.

        Queries at positions below `prefill_tokens` (default: the prompt) obey the prefill phase, later ones
        the decode phase.
        """
        self._prompt_tokens = len(prompt_ids) if prefill_tokens is None else prefill_tokens
        # The last output token is never an input: nothing was computed from it.
        ids = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        logits = self.model(ids, use_cache=False, logits_to_keep=len(output_ids)).logits[0]
        return Forced(logits.float().log_softmax(-1))

    def _attend(
        self,
        module: Any,
        query: Tensor,  # [1, Hq, T, D]
        key: Tensor,  # [1, Hkv, T, D]
        value: Tensor,  # [1, Hkv, T, D]
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        if query.shape[0] != 1 or attention_mask is not None or s_aux is not None:
            raise NotImplementedError("the oracle runs one unpadded sequence, without learned sinks")
        heads, tokens, size = query.shape[1:]
        kv_heads = key.shape[1]
        group = heads // kv_heads
        scale = size**-0.5 if scaling is None else scaling
        out = torch.empty_like(query)
        for head in range(kv_heads):
            of_head = slice(head * group, (head + 1) * group)
            for start in range(0, tokens, QUERY_CHUNK):
                stop = min(start + QUERY_CHUNK, tokens)
                scores = query[0, of_head, start:stop] @ key[0, head, :stop].T * scale  # [group, chunk, stop]
                if softcap:
                    scores = torch.tanh(scores / softcap) * softcap
                scores.masked_fill_(~self._mask(module.layer_idx, head, start, stop), -math.inf)
                out[0, of_head, start:stop] = scores.softmax(-1) @ value[0, head, :stop]
        return out.transpose(1, 2).contiguous(), None

    def _mask(self, layer: int, head: int, start: int, stop: int) -> Tensor:
        """bool [stop - start, stop] for the queries [start, stop) of one KV head."""
        queries, keys = torch.arange(start, stop), torch.arange(stop)
        prefill = self._prefill_sees(layer, head, queries, keys)
        if stop <= self._prompt_tokens:
            return prefill
        decode = self._decode_sees(layer, head, queries, keys)
        return torch.where((queries < self._prompt_tokens)[:, None], prefill, decode)

    def _prefill_sees(self, layer: int, head: int, queries: Tensor, keys: Tensor) -> Tensor:
        """bool [queries, keys] of positions, by what a KV head keeps while a prompt is read."""
        return visible(_retention(self.masks.prefill, layer, head), queries, keys)

    def _decode_sees(self, layer: int, head: int, queries: Tensor, keys: Tensor) -> Tensor:
        """bool [queries, keys] of positions, by what a KV head keeps while decoding."""
        return visible(_retention(self.masks.decode, layer, head), queries, keys)


def _retention(retentions: LayerRetentions, layer: int, head: int) -> Retention | None:
    of_layer = retentions.get(layer)
    return None if of_layer is None else of_layer[head]


@dataclass(frozen=True)
class Agreement:
    """How served requests compare with the oracle."""

    tokens: int
    equal: int  # served tokens that are the oracle's choice, exact ties counted as equal
    worst_logprob: float  # largest difference of any served log-probability, candidates included
    worst_gap: float  # how far, in log-probability, a served token was below the oracle's choice
    nan: bool  # a served log-probability was not a finite number
    first_mismatch: tuple[int, int] | None = None  # (request, output index)

    def __post_init__(self) -> None:
        if self.tokens == 0:
            raise ValueError("nothing to compare")

    @property
    def ok(self) -> bool:
        return self.equal == self.tokens and not self.nan and self.worst_logprob <= LOGPROB_TOLERANCE

    def __str__(self) -> str:
        text = f"{self.equal}/{self.tokens} tokens equal, worst log-probability difference "
        text += f"{self.worst_logprob:.2g}, worst gap {self.worst_gap:.2g}"
        if self.nan:
            text += ", NaN served"
        if self.first_mismatch is not None:
            text += ", first mismatch in request {} at output token {}".format(*self.first_mismatch)
        return text


def compare(served: Iterable[Served], forced: Iterable[Forced]) -> Agreement:
    """Served requests against the oracle's account of the same requests, in the same order."""
    tokens = equal = 0
    worst_logprob = worst_gap = 0.0
    nan = False
    first = None
    for request, (answer, truth) in enumerate(zip(served, forced, strict=True)):
        if len(answer.output_ids) != truth.logprobs.shape[0] or len(answer.logprobs) != len(
            answer.output_ids
        ):
            raise ValueError(f"request {request}: the oracle was run on other output tokens")
        best = truth.logprobs.max(-1).values.tolist()
        for index, (token, logprob) in enumerate(zip(answer.output_ids, answer.logprobs, strict=True)):
            row = truth.logprobs[index]
            claims = [(token, logprob), *(answer.top[index] if answer.top else ())]
            differences = [abs(claim - float(row[candidate])) for candidate, claim in claims]
            nan |= not all(math.isfinite(difference) for difference in differences)
            worst_logprob = max(worst_logprob, *differences)
            gap = best[index] - float(row[token])
            worst_gap = max(worst_gap, gap)
            tokens += 1
            if gap <= TIE_TOLERANCE:
                equal += 1
            elif first is None:
                first = (request, index)
    return Agreement(tokens, equal, worst_logprob, worst_gap, nan, first)


def check(
    oracle: Oracle, served: Sequence[Served], progress: Callable[[str], None] | None = None
) -> Agreement:
    """Teacher-force every served request, equal ones once, and compare."""
    # Equal requests next to each other: then one account at a time is in memory.
    order = sorted(range(len(served)), key=lambda i: (served[i].prompt_ids, served[i].output_ids))

    def forced() -> Iterator[Forced]:
        request: object = None
        account: Forced | None = None
        for number, index in enumerate(order, start=1):
            answer = served[index]
            if account is None or request != (answer.prompt_ids, answer.output_ids):
                request = (answer.prompt_ids, answer.output_ids)
                account = oracle.force(*request)
            yield account
            if progress is not None:
                progress(f"oracle: {number}/{len(served)} requests")

    agreement = compare((served[index] for index in order), forced())
    if agreement.first_mismatch is None:
        return agreement
    request, token = agreement.first_mismatch
    return replace(agreement, first_mismatch=(order[request], token))
