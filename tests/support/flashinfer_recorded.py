"""Which modules FlashInfer's own wrappers call for when kvir's prefill uses them, and which kvir would build.

    python -m support.flashinfer_recorded TARGET HEAD_DIM LOGIT_CAP     two lines of names

Nothing is compiled and nothing runs: a module that is called for is noted, and given one that does nothing.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch

from kvir.kernels.flashinfer.modules import PrefillFacts, specs
from kvir.kernels.flashinfer.prefill import Prefill, library
from kvir.kernels.ops import FULL, Bounds, Cache

PAGE, HEADS, GROUP = 16, 2, 4


class Nothing:
    """A compiled module."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: [0] * 16


def recorded(target: str, head_dim: int, cap: float) -> set[str]:
    called: set[str] = set()

    def note(spec: Any) -> Nothing:
        called.add(spec.name)
        return Nothing()

    package = library()
    utils: Any = import_module("flashinfer.utils")
    import_module("flashinfer.jit.core").JitSpec.build_and_load = note
    capability = divmod(int(target.removeprefix("sm_")), 10)
    loaded: list[Any] = [module for name, module in sys.modules.items() if name.startswith("flashinfer")]
    for module in loaded:
        if getattr(module, "get_compute_capability", None) is utils.get_compute_capability:
            module.get_compute_capability = lambda _device: capability
    utils.get_compute_capability = lambda _device: capability
    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    batch(Prefill("cpu", package), head_dim, cap)
    return called


def batch(prefill: Prefill, head_dim: int, cap: float) -> None:
    """Two requests, one of them with a prefix."""
    half = torch.bfloat16
    q = torch.zeros(6, HEADS * GROUP, head_dim, dtype=half)
    k = torch.zeros(6, HEADS, head_dim, dtype=half)
    cache = Cache(torch.zeros(8, 2, PAGE, head_dim, dtype=half), torch.zeros(4, HEADS, dtype=torch.int32))
    zeros, holes = torch.zeros(HEADS, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    bounds, out = Bounds(zeros, zeros + FULL), torch.empty_like(q)
    pages, before, fresh = torch.tensor([[1], [2]]), torch.tensor([0, 16]), torch.tensor([2, 4])
    lens = pages.int(), before.int(), fresh.int()
    prefill(q, k, k, cache, *lens, bounds, 0, 1.0, cap, out, holes)


if __name__ == "__main__":
    target, head_dim, cap = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    built = {spec.name for spec in specs(PrefillFacts(head_dim, "bfloat16", cap > 0), target)}
    print(*sorted(recorded(target, head_dim, cap)))
    print(*sorted(built))
