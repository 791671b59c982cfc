"""What a calibration found: the whole grid, as data and as a JSON file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvir.calibration.candidates import Candidate, Codebook
from kvir.calibration.seqcalib import Choices, Scores
from kvir.lowering.plan_file import write_atomically

FORMAT = 1
Phase = Literal["both", "decode"]
Objective = Literal["cosine", "residual", "gates"]


class Inputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that the findings depend on."""

    arch: str
    model: str  # fingerprint, as in a policy's provenance
    weights: str  # digest of the checkpoint
    data: str  # name and SHA-256 of the text
    context_tokens: int
    samples: int
    retrieval_samples: int
    retrieval_weight: float
    query_positions: int  # of a text sample
    taus: tuple[float, ...]
    objective: Objective
    gate_window_tokens: int | None = None  # of heads with a closed gate, while gates are fitted
    gate_steps: int | None = None
    window_weight: float | None = None  # of retrieval samples, for the windows; None: retrieval_weight
    phase: Phase
    budget: float | None
    budget_context_tokens: int | None = None  # where rows are counted, if not at context_tokens
    held_out: str
    held_out_samples: int
    seed: int
    dtype: str

    @property
    def counted_tokens(self) -> int:
        """The context of which shares of rows are shares."""
        return self.budget_context_tokens or self.context_tokens


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One policy: a candidate per KV head."""

    name: str
    tau: float | None  # None: not by a threshold
    choices: Choices
    scores: Scores  # cosine [layer][K][KV head]
    minimum_head_score: float
    kept_share: float  # of the rows of the configurable layers, weighted by their size
    error: float | None  # sum of errors over the residual norm, where they were measured
    loss: float | None  # held-out, nats per token over the last half of a context


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The grid.  Axes: `layers` are the configurable ones, in execution order."""

    format: int
    version: str
    inputs: Inputs
    candidates: tuple[tuple[int, int | None], ...]  # (sink tokens, recent tokens), full last
    layers: tuple[int, ...]
    errors: Scores | None  # over the residual norm [layer][K][KV head]
    gates: tuple[tuple[float, ...], ...] | None = None  # logits [layer][KV head]
    loss_full: float | None
    points: tuple[Point, ...]
    chosen: int

    @property
    def codes(self) -> Codebook:
        return tuple(Candidate(recent, sink) for sink, recent in self.candidates)

    @property
    def best(self) -> Point:
        return self.points[self.chosen]


def write(path: str | os.PathLike[str], calibration: Calibration) -> None:
    """As indented JSON, atomically."""
    data = msgspec.json.format(msgspec.json.encode(calibration), indent=1)
    write_atomically(path, data + b"\n")


def read(data: bytes) -> Calibration:
    """The inverse of `write`.  Raises ValueError for what is no calibration of this format."""
    calibration = msgspec.json.decode(data, type=Calibration)
    if calibration.format != FORMAT:
        raise ValueError(f"format {calibration.format} is not {FORMAT}")
    return calibration


def kept_share(choices: Choices, costs: Sequence[Sequence[int]]) -> float:
    """Cost of the choices over that of full histories; `costs` is [layer][K], full last."""
    taken = sum(row[k] for chosen, row in zip(choices, costs, strict=True) for k in chosen)
    return taken / sum(row[-1] * len(chosen) for chosen, row in zip(choices, costs, strict=True))
