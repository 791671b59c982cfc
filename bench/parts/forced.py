"""Decode steps of a served request under tokens that are given: how likely each was, and the likeliest.

A second turn would be a prompt of its own, and rows would be chosen anew with it in sight.  Here the request
generates what it is told to, so its rows stay those that its prompt left, as they do for a user who reads an
answer.  SGLang reports log-probabilities after its logit processors, so the processor itself notes them.
"""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from evaluation.server import Server

ARGUMENTS = ("--enable-custom-logit-processor",)


@dataclass(frozen=True)
class Forced:
    """What a server made of given tokens."""

    logprobs: tuple[float, ...]  # of each of them
    likeliest: tuple[int, ...]  # the token that would have been there
    rid: str

    def loss(self, counted: int) -> float:
        """Nats a token, over the last `counted`."""
        return -sum(self.logprobs[-counted:]) / counted

    def right(self, tokens: Sequence[int], counted: int) -> list[bool]:
        """Which of the last `counted` of the given tokens were the likeliest."""
        return [
            mine == wanted for mine, wanted in zip(self.likeliest[-counted:], tokens[-counted:], strict=True)
        ]


class Follow(CustomLogitProcessor):
    """Runs in the server: `tokens` are generated one after another, and what is noted goes to `path`."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        for row, given in zip(logits, custom_param_list or (), strict=True):
            noted = given.setdefault("noted", [])
            if len(noted) == len(given["tokens"]):
                continue  # a step that overlap launched after the last
            token = given["tokens"][len(noted)]
            noted.append((float(torch.log_softmax(row.float(), -1)[token]), int(row.argmax())))
            row.fill_(-torch.inf)
            row[token] = 0
            if len(noted) == len(given["tokens"]):
                Path(given["path"]).write_text(json.dumps(noted))
        return logits


def follow(server: Server, prompt: Sequence[int], tokens: Sequence[int], folder: Path) -> Forced:
    """One request; `folder` is where the server leaves what it noted."""
    path = folder / f"{uuid.uuid4().hex}.json"
    body = {
        "input_ids": list(prompt),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": len(tokens),
            "ignore_eos": True,
            "custom_params": {"tokens": list(tokens), "path": str(path)},
        },
        "custom_logit_processor": Follow.to_str(),
    }
    answer = server.post("/generate", body).json()
    if (found := answer["output_ids"]) != list(tokens):
        pairs = zip(found, tokens, strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        ended = answer["meta_info"]["finish_reason"]
        raise RuntimeError(f"{len(found)} tokens for {len(tokens)} given, the first {same} the same: {ended}")
    noted = json.loads(path.read_text())
    path.unlink()
    logprobs, likeliest = zip(*noted, strict=True)
    return Forced(logprobs, likeliest, answer["meta_info"]["id"])
