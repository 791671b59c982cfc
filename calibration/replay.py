"""The replay check: with full windows, what a calibration measures must be what the model computes.

The model's usual attention, masks and all, against ours, at the input of each layer's output projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvir.calibration.candidates import FULL
from kvir.calibration.harness import CalibrationError, Harness, keep_everything
from kvir.calibration.interface import AttentionCall
from kvir.calibration.partial import cosine, outputs
from kvir.calibration.parts import find_parts

MINIMUM = 0.99
TOKENS = 1024


@torch.no_grad()
def replay(harness: Harness, ids: Sequence[int]) -> float:
    """The smallest mean cosine of any KV head.

    Raises:
        CalibrationError: it is below 0.99, so the measurements would not be of this model.
    """
    ids = list(ids)[:TOKENS]
    parts = find_parts(harness)
    seen: dict[int, Tensor] = {}
    positions = torch.arange(0, len(ids), 8, device=harness.device)

    def keep(layer_id: int) -> Any:
        def hook(module: Any, args: Any) -> None:
            seen[layer_id] = args[0][0, positions].float()

        return hook

    hooks = [part.output.register_forward_pre_hook(keep(i)) for i, part in parts.items()]
    try:
        with harness.stock_attention():
            harness.hidden(ids, keep_everything)
        stock, seen = seen, {}
        partial: dict[int, float] = {}

        def attention(call: AttentionCall) -> Tensor:
            out = keep_everything(call)
            found = torch.cat([block for _, block in outputs(call, positions, [FULL])], 3)[0]
            expected = out[positions].view(len(positions), *found.shape[:2], -1).permute(1, 2, 0, 3)
            partial[call.layer_id] = float(cosine(found, expected.float()).mean((1, 2)).min())
            return out

        harness.hidden(ids, attention)
    finally:
        for hook in hooks:
            hook.remove()
    worst = min(partial.values())
    for layer in harness.configurable:
        shape = (len(positions), layer.kv_heads, -1)
        equal = cosine(seen[layer.layer_id].view(shape), stock[layer.layer_id].view(shape))
        worst = min(worst, float(equal.mean(0).min()))
    if not worst >= MINIMUM:
        raise CalibrationError(
            f"replay check failed: with full windows a head's output has cosine {worst:.4f} with the model's "
            f"own (at least {MINIMUM} is needed); this model's attention is not understood"
        )
    return worst
