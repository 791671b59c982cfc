"""The rotation tables of a model, found by watching it: scores that look past the rotation need them.

A model computes (cos, sin) once and hands them to its attention modules as `position_embeddings`.  Whether
dimensions turn in halves or in neighbours shows in the keys of a text of one repeated token, which are nearly
the same once the rotation is undone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvir.calibration.harness import Harness, keep_everything
from kvir.calibration.interface import AttentionCall
from kvir.kernels.ref.score_rope import unrotate
from kvir.kernels.score_ops import Rope

REPEATS = 128
COMPARED = 32  # the last ones: learned sinks and recurrent layers tell the first ones apart
TOLERANCE = 0.3  # wrong readings are off by 1 or so


@torch.no_grad()
def find_ropes(harness: Harness, tokens: int) -> dict[int, Rope]:
    """layer_id -> tables for the positions below `tokens`; layers whose rotation is not understood are left
    out."""
    made: dict[int, tuple[Any, Any, Any]] = {}  # id of cos -> (module, arguments, keyword arguments)
    alive: list[Tensor] = []  # so that no id is used twice
    given: dict[int, int] = {}  # layer_id -> id of cos
    keys: dict[int, Tensor] = {}

    def returned(module: Any, args: Any, kwargs: Any, result: Any) -> None:
        if isinstance(result, tuple) and len(result) == 2 and all(isinstance(x, Tensor) for x in result):
            alive.append(result[0])
            made[id(result[0])] = (module, args, kwargs)

    def attention(call: AttentionCall) -> Tensor:
        keys[call.layer_id] = call.key.float().transpose(0, 1)  # [T, Hkv, D]
        return keep_everything(call)

    hooks: list[Any] = []
    harness.hidden(range(1, 3), keep_everything)  # attention modules are known after a pass
    for layer_id, module in harness.modules.items():

        def called(module: Any, args: Any, kwargs: Any, layer_id: int = layer_id) -> None:
            tables = kwargs.get("position_embeddings")
            if isinstance(tables, tuple):
                given[layer_id] = id(tables[0])

        hooks.append(module.register_forward_pre_hook(called, with_kwargs=True))
    for module in harness.model.modules():
        hooks.append(module.register_forward_hook(returned, with_kwargs=True))
    try:
        harness.hidden([_plain_token(harness)] * REPEATS, attention)
    finally:
        for hook in hooks:
            hook.remove()
    found: dict[int, Rope] = {}
    for layer in harness.configurable:
        source = made.get(given.get(layer.layer_id, 0))
        for rope in () if source is None else _readings(source, tokens, harness.device):
            if _deviation(keys[layer.layer_id], rope) < TOLERANCE:
                found[layer.layer_id] = rope
                break
    return found


def _readings(source: tuple[Any, Any, Any], tokens: int, device: str) -> Iterator[Rope]:
    """The same call for more positions, and each way to read what it returns: a figure per dimension, pairs
    in halves or neighbours, or a figure per pair."""
    module, args, kwargs = source
    positions = torch.arange(tokens, device=device)[None]

    def moved(value: Any) -> Any:
        return positions if isinstance(value, Tensor) and value.dtype == torch.int64 else value

    cos, sin = module.forward(*map(moved, args), **{name: moved(value) for name, value in kwargs.items()})
    if cos.shape[:2] != (1, tokens):
        return
    cos, sin = cos[0].float(), sin[0].float()
    half = cos.shape[1] // 2
    for cut in (slice(0, half), slice(0, None, 2), slice(None)):
        for interleaved in (False, True):
            yield Rope(cos[:, cut], sin[:, cut], interleaved=interleaved)


def _deviation(keys: Tensor, rope: Rope) -> float:
    """How far the keys of equal tokens differ once the rotation is undone, relative to their size."""
    if 2 * rope.cos.shape[1] > keys.shape[2]:
        return math.inf
    plain = unrotate(keys, rope, torch.arange(keys.shape[0], device=keys.device))[-COMPARED:]
    return float((plain - plain[-1:]).norm(dim=-1).max() / plain.norm(dim=-1).max().clamp_min(1e-12))


def _plain_token(harness: Harness) -> int:
    return int(harness.tokenizer("a", add_special_tokens=False).input_ids[0])
