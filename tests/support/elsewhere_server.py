"""`sglang.launch_server` on a CPU with the rows that kvir selects from on a second device
(`support.elsewhere`).

The model and attention compute here.  What reaches the selection of rows lies there: queries, keys and values
of the layers, the pool with its table and biases, and what scores read of the model.  Run as a module, which
SGLang's children import again.
"""

from __future__ import annotations

import runpy
from dataclasses import replace
from typing import Any

import torch

from kvir.sglang_ext import standin

standin.install()

from kvir.sglang_ext import model_parts, selecting  # noqa: E402  they import SGLang, which needs the stand-in
from support.elsewhere import DEVICE, Elsewhere, back, elsewhere, move  # noqa: E402


class Pool:
    """The pool as it would be there: the same memory."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._pool, name)
        return value.as_subclass(Elsewhere) if isinstance(value, torch.Tensor) else value


class Selection(selecting.RowSelection):
    def __init__(self, pool: Any, *others: Any) -> None:
        super().__init__(Pool(pool), *others)  # pyright: ignore[reportArgumentType]
        print(f"rows are selected on {DEVICE}", flush=True)

    def observe(self, works: Any, call: Any) -> None:
        with elsewhere():
            super().observe(works, _there(call))

    def attend_blocks(self, work: Any, call: Any, out: torch.Tensor) -> None:
        with elsewhere():
            found = move(out)
            super().attend_blocks(work, _there(call), found)
        out.copy_(back(found))

    def after_append(self, works: Any, layer: int) -> None:
        with elsewhere():
            super().after_append(works, layer)


class Parts(model_parts.ModelParts):
    def w_o(self, layer_id: int) -> Any:
        return move(super().w_o(layer_id))

    def rope(self, layer_id: int) -> Any:
        rope = super().rope(layer_id)
        return replace(rope, cos=move(rope.cos), sin=move(rope.sin))


def _there(call: Any) -> Any:
    assert call.q.device != DEVICE
    return replace(call, q=move(call.q), k=move(call.k), v=move(call.v))


def displace() -> None:
    from kvir.sglang_ext import backend

    backend.RowSelection = Selection
    model_parts.ModelParts = Parts


displace()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
