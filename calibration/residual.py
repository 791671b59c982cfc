"""The residual objective: what a candidate changes in the residual stream, over the norm of the stream.

For every KV head and candidate, with everything else full: the norm of the change of the attention block's
contribution at the query positions over the norm of the residual stream that enters the layer, averaged.
Raw relative errors mislead: layers that add 1 % of the residual matter little whatever they lose.  The
allocation then minimises the sum of the errors over all heads under a budget, exactly (a knapsack with one
choice per head).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvir.calibration.attend import attend
from kvir.calibration.candidates import FULL, Codebook
from kvir.calibration.contribution import Contribution
from kvir.calibration.harness import Harness
from kvir.calibration.interface import AttentionCall
from kvir.calibration.memo import Memo
from kvir.calibration.partial import outputs
from kvir.calibration.parts import Parts, find_parts
from kvir.calibration.samples import Sample
from kvir.calibration.seqcalib import Choices, Progress, Scores

MAX_UNITS = 1 << 16  # of cost in the knapsack; finer costs are rounded up


def error_curves(
    harness: Harness,
    samples: Sequence[Sample],
    codes: Codebook,
    memo: Memo,
    progress: Progress,
    *,
    retrieval_weight: float,
) -> Scores:
    """Errors [layer][K][Hkv]: the mean over the texts plus the weighted mean over the retrieval samples."""
    parts = find_parts(harness)
    weight = {"text": 1.0, "retrieval": retrieval_weight}
    total: Any = None
    for number, sample in enumerate(samples):

        def find(sample: Sample = sample) -> list[Any]:
            return _Curves(harness, parts, sample, codes).run()

        found = memo.get(["residual", number], find)
        share = weight[sample.kind] / sum(other.kind == sample.kind for other in samples)
        scaled = [np.asarray(layer) * share for layer in found]
        total = scaled if total is None else [a + b for a, b in zip(total, scaled, strict=True)]
        for _ in harness.configurable:
            progress()
    return tuple(tuple(tuple(float(x) for x in row) for row in layer) for layer in total)


class _Curves:
    """One sample through the model, full histories all along."""

    def __init__(self, harness: Harness, parts: dict[int, Parts], sample: Sample, codes: Codebook) -> None:
        self._harness, self._parts, self._sample, self._codes = harness, parts, sample, codes
        self._positions = torch.tensor(sample.positions, device=harness.device)
        self._residual: Tensor | None = None  # [Q, hidden]
        self._pending: tuple[int, Tensor, Tensor] | None = None  # layer, changes [K, Hkv, G, Q, Dv], full
        self._found: dict[int, list[list[float]]] = {}

    def run(self) -> list[list[list[float]]]:
        """Mean relative errors [layer][K][Hkv]."""
        hooks: list[Any] = []
        for part in self._parts.values():
            hooks.append(part.decoder_layer.register_forward_pre_hook(self._layer_starts, with_kwargs=True))
            hooks.append(part.output.register_forward_hook(self._projected))
        try:
            self._harness.hidden(self._sample.ids, self._attention)
        finally:
            for hook in hooks:
                hook.remove()
        return [self._found[layer_id] for layer_id in self._parts]

    def _layer_starts(self, module: Any, args: Any, kwargs: Any) -> None:
        stream = args[0] if args else kwargs["hidden_states"]
        self._residual = stream[0, self._positions].float()

    def _attention(self, call: AttentionCall) -> Tensor:
        found = torch.cat([block for _, block in outputs(call, self._positions, self._codes)], 3)
        self._pending = (call.layer_id, found - found[-1:], found[-1])
        return attend(call, [FULL] * call.key.shape[0])

    def _projected(self, module: Any, args: Any, result: Tensor) -> None:
        if self._pending is None:
            return
        (layer_id, changes, full), self._pending = self._pending, None
        residual, self._residual = self._residual, None
        assert residual is not None
        flat = full.permute(2, 0, 1, 3)  # [Q, Hkv, G, Dv]
        given = args[0][0, self._positions].float().view(flat.shape)
        # what lies between attention and projection is elementwise: an output gate, or nothing
        gate = torch.where(flat.abs() > 1e-6, given / flat, 1.0)
        contribution = Contribution(self._parts[layer_id], full, gate)
        norm = residual.norm(dim=-1).clamp_min(1e-12)
        # one candidate at a time bounds the memory
        rows = [
            (contribution.moved(change).norm(dim=-1) / norm).mean(-1, dtype=torch.float64)
            for change in changes
        ]
        self._found[layer_id] = torch.stack(rows).tolist()


def allocate(errors: Scores, costs: Sequence[Sequence[int]], limit: int) -> Choices | None:
    """Candidates of least total error at a cost of at most `limit`; None if nothing fits.

    `costs` is [layer][K], the same for all heads of a layer.  Exact unless costs are finer than 1/65536 of
    the limit; then they are rounded up, so the limit still holds.  Of equals the earlier candidate wins.
    """
    unit = max(math.gcd(*(cost for row in costs for cost in row)), -(-limit // MAX_UNITS), 1)
    capacity = limit // unit
    best, taken = np.zeros(capacity + 1), list[Any]()
    for layer, row in zip(errors, costs, strict=True):
        for head in range(len(layer[0])):
            options = np.full((len(row), capacity + 1), np.inf)
            for k, cost in enumerate(row):
                units = -(-cost // unit)
                if units <= capacity:
                    options[k, units:] = best[: capacity + 1 - units] + layer[k][head]
            taken.append(options.argmin(0).astype(np.uint8))
            best = options.min(0)
    if not np.isfinite(best[capacity]):
        return None
    flat, left = list[int](), capacity
    costs_of = [row for layer, row in zip(errors, costs, strict=True) for _ in layer[0]]
    for choice, row in zip(reversed(taken), reversed(costs_of), strict=True):
        flat.append(int(choice[left]))
        left -= -(-row[flat[-1]] // unit)
    flat.reverse()
    heads = iter(flat)
    return tuple(tuple(next(heads) for _ in layer[0]) for layer in errors)
