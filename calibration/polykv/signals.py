"""The two signals of PolyKV (arXiv:2606.15157), layer after layer, with lower layers already deployed.

Eviction signal: how much a method at the reference budget changes what attention adds to the residual stream,
over the size of what it adds.  The method with the least is chosen.  Sensitivity signal: the same change at
every budget, over the size of the residual stream it is added to: a layer that adds one per cent may lose all
of it.  Both are measured at queries after a prompt at whose end the method has chosen its rows; those of the
prompt itself are read with full histories, so what a method keeps does not depend on what lower layers keep.

A unit is a layer or a KV head.  Means are over the positions of all samples of a kind; retrieval samples are
added with a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor

from kvir.calibration.contribution import Contribution
from kvir.calibration.harness import CalibrationError, Harness
from kvir.calibration.interface import AttentionCall
from kvir.calibration.lockstep import Suspended
from kvir.calibration.memo import Memo
from kvir.calibration.polykv.kept import Model, visible
from kvir.calibration.polykv.methods import Method
from kvir.calibration.polykv.stream import gates, watched
from kvir.calibration.polykv.visible import attend_after, masked_each
from kvir.calibration.samples import Sample
from kvir.calibration.seqcalib import Progress

Grain = Literal["layer", "head"]
Asked = tuple[AttentionCall, Tensor]  # a call, and the norms [Q] of the stream that enters its layer
Pass = Suspended[Asked, Tensor, Tensor]


class LayerSignals(msgspec.Struct, frozen=True):
    """One layer.  Axes: M methods, K budgets, U units."""

    relative: list[list[list[float]]]  # [M][K][U] over the size of the contribution
    residual: list[list[list[float]]]  # [M][K][U] over the size of the residual stream


@dataclass(frozen=True)
class Setting:
    """What is measured.  Budgets are shares of a prompt, ascending; the last is all of it."""

    methods: tuple[Method, ...]
    shares: tuple[float, ...]
    reference: int  # index of the share that choices are made and deployed at
    context_tokens: int  # prompt of a text sample; windows are shares of it
    grain: Grain
    retrieval_weight: float

    def rows(self, method: Method, prompt_tokens: int) -> list[int]:
        """Rows at each budget but the last."""
        tokens = self.context_tokens if method.term is None else prompt_tokens
        return [round(share * tokens) for share in self.shares[:-1]]


def signals(
    harness: Harness,
    model: Model,
    setting: Setting,
    samples: Sequence[Sample],
    memo: Memo,
    progress: Progress,
) -> tuple[list[LayerSignals], list[list[int]]]:
    """The signals of each configurable layer, and the method chosen for each of its units.

    Raises:
        CalibrationError: a signal is not a finite number.
    """
    found: list[LayerSignals] = []
    chosen: list[list[int]] = []
    for layer in harness.configurable:  # what an earlier run found needs no forward pass
        name = ["signals", layer.layer_id, chosen]
        if name not in memo:
            break
        found.append(msgspec.convert(memo.get(name, dict), LayerSignals))
        chosen.append(choose(found[-1], setting.reference))
        for _ in samples:
            progress()
    if len(found) < len(harness.configurable):
        with torch.device(harness.device), watched(model.parts) as stream:
            _go_on(harness, model, setting, samples, memo, progress, stream, found, chosen)
    return found, chosen


def choose(signal: LayerSignals, budget: int) -> list[int]:
    """The method of least error of each unit at a budget; of equals the first."""
    units = range(len(signal.relative[0][0]))
    return [min(range(len(signal.relative)), key=lambda m: (signal.relative[m][budget][u], m)) for u in units]


def _go_on(
    harness: Harness,
    model: Model,
    setting: Setting,
    samples: Sequence[Sample],
    memo: Memo,
    progress: Progress,
    stream: Any,
    found: list[LayerSignals],
    chosen: list[list[int]],
) -> None:
    gated = [gates(harness, model.parts, sample) for sample in samples]

    def start(sample: Sample) -> Pass:
        positions = torch.tensor(sample.positions)
        return Suspended(
            lambda ask: harness.hidden(sample.ids, lambda call: ask((call, stream.norms(positions))))
        )

    passes = [start(sample) for sample in samples]
    answers: list[Tensor | None] = [None] * len(samples)
    try:
        for index, layer in enumerate(harness.configurable):
            asked: list[Asked] = []
            for number, one in enumerate(passes):
                question = one.advance(answers[number])
                answers[number] = None
                if question is None or question[0].layer_id != layer.layer_id:
                    raise CalibrationError(f"the model does not run layer {layer.layer_id} where it should")
                asked.append(question)
            if index == len(chosen):
                gate = [of_sample.get(layer.layer_id) for of_sample in gated]
                name = ["signals", layer.layer_id, chosen]
                measure = _Layer(model, setting, samples, progress)
                plain = memo.get(
                    name, lambda a=asked, g=gate, m=measure: msgspec.to_builtins(m.signals(a, g))
                )
                found.append(msgspec.convert(plain, LayerSignals))
                chosen.append(choose(found[-1], setting.reference))
            if index + 1 < len(harness.configurable):  # nothing is measured after the last choice
                answers = [
                    deployed(model, setting, call, sample, chosen[index])
                    for (call, _), sample in zip(asked, samples, strict=True)
                ]
    finally:
        for one in passes:
            one.stop()


@torch.no_grad()
def deployed(
    model: Model, setting: Setting, call: AttentionCall, sample: Sample, chosen: Sequence[int]
) -> Tensor:
    """Outputs [T, Hq, Dv] of a layer whose units have their methods at the reference budget."""
    kv_heads, rows = call.key.shape[:2]
    after = torch.arange(sample.prompt_tokens, rows)
    methods = [setting.methods[m] for m in dict.fromkeys(chosen)]
    scores = [method.term.by for method in methods if method.term is not None]
    inputs = model.inputs(call, sample.prompt_tokens, scores) if scores else None
    seen = torch.empty(kv_heads, len(after), rows, dtype=torch.bool)
    for method, index in zip(methods, dict.fromkeys(chosen), strict=True):
        budget = setting.rows(method, sample.prompt_tokens)[setting.reference]
        (mask,) = visible(method, inputs, [budget], after, rows, kv_heads)
        # a list of one choice is that of the whole layer
        heads = [h for h in range(kv_heads) if chosen[h if len(chosen) > 1 else 0] == index]
        seen[heads] = mask[heads]
    return attend_after(call, sample.prompt_tokens, seen)


class _Layer:
    """Measures one layer over all samples."""

    def __init__(self, model: Model, setting: Setting, samples: Sequence[Sample], progress: Progress) -> None:
        self._model, self._setting, self._samples, self._progress = model, setting, samples, progress

    @torch.no_grad()
    def signals(self, asked: Sequence[Asked], gate: Sequence[Tensor | None]) -> LayerSignals:
        total: Tensor | None = None  # [2, M, K, U]
        for kind in dict.fromkeys(sample.kind for sample in self._samples):
            sums, count = torch.zeros(()), 0
            for question, sample, of_sample in zip(asked, self._samples, gate, strict=True):
                if sample.kind == kind:
                    sums = sums + self._sample(question, sample, of_sample)
                    count += len(sample.positions)
                    self._progress()
            weight = 1.0 if kind == "text" else self._setting.retrieval_weight
            total = weight * sums / count + (0.0 if total is None else total)
        assert total is not None
        if not total.isfinite().all():
            raise CalibrationError(f"layer {asked[0][0].layer_id} gives numbers that are not finite")
        return LayerSignals(*total.tolist())

    def _sample(self, asked: Asked, sample: Sample, gate: Tensor | None) -> Tensor:
        """float64 [2, M, K, U]: sums over positions of both signals."""
        (call, stream), setting = asked, self._setting
        kv_heads, rows = call.key.shape[:2]
        positions = torch.tensor(sample.positions)
        methods = setting.methods
        scores = [method.term.by for method in methods if method.term is not None]
        inputs = self._model.inputs(call, sample.prompt_tokens, scores) if scores else None
        causal = (torch.arange(rows) <= positions[:, None]).expand(kv_heads, -1, -1)
        (full,) = masked_each(call, positions, [causal])
        way = Contribution(self._model.parts[call.layer_id], full, gate)
        per_head = setting.grain == "head"
        size = (way.of_heads if per_head else way.whole[None]).norm(dim=-1).clamp_min(1e-12)  # [U, Q]
        out = torch.zeros(2, len(methods), len(setting.shares), size.shape[0], dtype=torch.float64)
        for m, method in enumerate(methods):
            budgets = setting.rows(method, sample.prompt_tokens)
            masks = visible(method, inputs, budgets, positions, rows, kv_heads)
            for k, found in enumerate(masked_each(call, positions, masks)):
                change = found - full
                moved = way.moved(change) if per_head else way.moved_together(change)[None]
                norms = moved.norm(dim=-1).double()  # [U, Q]
                out[0, m, k] = (norms / size).sum(-1)
                out[1, m, k] = (norms / stream).sum(-1)
        return out.cpu()
