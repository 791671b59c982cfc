"""The residual stream that enters each layer, and gates on attention outputs, where a pass is looked at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from kvir.calibration.attend import attend
from kvir.calibration.candidates import FULL
from kvir.calibration.harness import Harness
from kvir.calibration.interface import AttentionCall
from kvir.calibration.parts import Parts
from kvir.calibration.samples import Sample


class Stream:
    """What entered the layer that runs now.  One pass runs at a time, whoever else waits."""

    def __init__(self) -> None:
        self._now: Tensor | None = None  # [T, hidden]

    def norms(self, positions: Tensor) -> Tensor:
        """float32 [Q]: of the stream at these positions, in the layer whose attention is asked for."""
        assert self._now is not None
        return self._now[positions].float().norm(dim=-1).clamp_min(1e-12)

    def enters(self, module: Any, args: Any, kwargs: Any) -> None:
        self._now = (args[0] if args else kwargs["hidden_states"])[0]


@contextmanager
def watched(parts: Mapping[int, Parts]) -> Iterator[Stream]:
    """The stream of the passes in a `with` block."""
    stream = Stream()
    layers = [part.decoder_layer for part in parts.values()]
    hooks = [layer.register_forward_pre_hook(stream.enters, with_kwargs=True) for layer in layers]
    try:
        yield stream
    finally:
        for hook in hooks:
            hook.remove()


def gates(harness: Harness, parts: Mapping[int, Parts], sample: Sample) -> dict[int, Tensor]:
    """layer_id -> [Q, Hkv, G, Dv]: what attention outputs are multiplied by before the projection, with full
    histories; layers without a gate are left out."""
    gated = {layer_id: part for layer_id, part in parts.items() if part.gated}
    if not gated:
        return {}
    positions = torch.tensor(sample.positions, device=harness.device)
    outputs: dict[int, Tensor] = {}
    found: dict[int, Tensor] = {}

    def attention(call: AttentionCall) -> Tensor:
        out = attend(call, [FULL] * call.key.shape[0])  # [T, Hq, Dv]
        outputs[call.layer_id] = out[positions].float().unflatten(1, (call.key.shape[0], -1))
        return out

    def projected(layer_id: int) -> Any:
        def hook(module: Any, args: Any) -> None:
            out = outputs.pop(layer_id)
            given = args[0][0, positions].float().view(out.shape)
            found[layer_id] = torch.where(out.abs() > 1e-6, given / out, 1.0)

        return hook

    hooks = [part.output.register_forward_pre_hook(projected(i)) for i, part in gated.items()]
    try:
        harness.hidden(sample.ids, attention)
    finally:
        for hook in hooks:
            hook.remove()
    return found
