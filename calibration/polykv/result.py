"""What `kvir calibrate polykv` found: the whole grid, as data and as a JSON file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvir.calibration.polykv.signals import Grain, LayerSignals
from kvir.lowering.plan_file import write_atomically

FORMAT = 1


class Inputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that the findings depend on."""

    arch: str
    model: str  # fingerprint, as in a policy's provenance
    weights: str  # digest of the checkpoint
    data: str  # name and SHA-256 of the text
    grain: Grain
    budget: float  # share of the rows
    minimum_rows: int  # of a unit
    context_tokens: int  # of the prompt of a text sample
    continuation_tokens: int  # after it
    samples: int
    retrieval_samples: int
    retrieval_weight: float
    query_stride: int
    held_out: str
    held_out_samples: int
    seed: int
    dtype: str


class MethodRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One candidate: its name, and its rule at the budget of the plan, as text."""

    name: str
    rule: str


class UnitChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one unit is given."""

    method: int  # index into the methods
    rows: int  # of a prompt of `context_tokens`; all of them: the unit keeps everything


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One policy on held-out text."""

    name: str
    kept_share: float  # of the rows of prompts, in the layers that may be cut
    losses: tuple[float, ...]  # of each held-out sample: nats per token of its continuation

    @property
    def loss(self) -> float:
        return sum(self.losses) / len(self.losses)


class PolyCalibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The grid.  Axes: `layers` are the configurable ones, in execution order; units are KV heads, or one."""

    kind: Literal["polykv"]
    format: int
    version: str
    inputs: Inputs
    methods: tuple[MethodRule, ...]
    shares: tuple[float, ...]  # budgets measured, ascending, 1 last
    layers: tuple[int, ...]
    signals: tuple[LayerSignals, ...]  # [layer], each [method][budget][unit]
    routed: tuple[tuple[int, ...], ...]  # [layer][unit]: the method chosen by the eviction signal
    choices: tuple[tuple[UnitChoice, ...], ...]  # [layer][unit]
    full: Point | None  # on held-out text, if there is any
    singles: tuple[Point, ...]  # each method everywhere, at the same budget
    plan: Point | None

    @property
    def best_single(self) -> Point | None:
        """The single method of least loss."""
        return min(self.singles, key=lambda point: point.loss, default=None)

    @property
    def gap_recovered(self) -> float | None:
        """(best single method - plan) / (best single method - full) in held-out loss."""
        if self.full is None or self.plan is None or self.best_single is None:
            return None
        gap = self.best_single.loss - self.full.loss
        return (self.best_single.loss - self.plan.loss) / gap if gap > 0 else None


def write(path: str | os.PathLike[str], found: PolyCalibration) -> None:
    """As indented JSON, atomically."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")


def read(data: bytes) -> PolyCalibration:
    """The inverse of `write`.  Raises ValueError for what is no grid of this format."""
    found = msgspec.json.decode(data, type=PolyCalibration)
    if found.format != FORMAT:
        raise ValueError(f"format {found.format} is not {FORMAT}")
    return found


def interval(losses: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """Mean difference of paired losses, and half the width of its 95 % interval (normal)."""
    differences = [a - b for a, b in zip(losses, others, strict=True)]
    mean = sum(differences) / len(differences)
    if len(differences) < 2:
        return mean, float("nan")
    variance = sum((d - mean) ** 2 for d in differences) / (len(differences) - 1)
    return mean, 1.96 * (variance / len(differences)) ** 0.5
