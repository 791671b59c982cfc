"""Where a layer's attention output goes: found by watching one short forward pass, not by names.

`o = output(attention)`, then perhaps a norm (Gemma), then the residual stream.  The residual stream itself is
what the decoder layer receives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from kvir.calibration.harness import CalibrationError, Harness, keep_everything
from kvir.calibration.interface import AttentionCall


@dataclass(frozen=True)
class Parts:
    """The modules of one layer."""

    decoder_layer: Any  # its first argument is the residual stream
    output: Any  # the output projection, a linear map
    after: Any | None  # a norm between the projection and the residual stream
    gated: bool = False  # something elementwise lies between attention outputs and the projection


def find_parts(harness: Harness) -> dict[int, Parts]:
    """layer_id -> parts, for the layers whose history may be cut.

    Raises:
        CalibrationError: a layer without an output projection.
    """
    wanted = {layer.layer_id for layer in harness.configurable}
    output: dict[int, Any] = {}
    after: dict[int, Any] = {}
    gated: dict[int, bool] = {}
    called: list[tuple[int, torch.Tensor]] = []  # layer and outputs of attention that is not yet projected
    results: dict[int, tuple[int, Any]] = {}  # id of an attention module's output -> (layer_id, the output)

    def attention(call: AttentionCall) -> torch.Tensor:
        found = keep_everything(call)
        called.append((call.layer_id, found))
        return found

    def before(module: Any, args: Any) -> None:
        given = args[0] if args else None
        if id(given) in results:
            layer_id, kept = results.pop(id(given))
            if kept is given:
                after.setdefault(layer_id, module)

    def done(module: Any, args: Any, result: Any) -> None:
        if called and getattr(module, "weight", None) is not None and module.weight.ndim == 2:
            layer_id, found = called.pop()
            output[layer_id] = module
            gated[layer_id] = not torch.equal(args[0].flatten(), found.flatten())
        if module in harness.modules.values():
            tensor = result[0] if isinstance(result, tuple) else result
            results[id(tensor)] = (module.layer_idx, tensor)

    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(done)]
    try:
        harness.hidden(range(1, 9), attention)
    finally:
        for hook in hooks:
            hook.remove()
    names = {module: name for name, module in harness.model.named_modules()}
    missing = wanted - output.keys()
    if missing:
        raise CalibrationError(f"no output projection was found for layers {sorted(missing)}")
    return {
        layer_id: Parts(
            harness.model.get_submodule(names[harness.modules[layer_id]].rpartition(".")[0]),
            output[layer_id],
            after.get(layer_id),
            gated[layer_id],
        )
        for layer_id in sorted(wanted)
    }
