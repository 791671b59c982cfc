"""The cases of the tests on a GPU, against the reference on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from kvir.kernels.flashinfer.prefill import Prefill, with_prefill
from kvir.kernels.ops import Bounds, Cache, Kernels
from kvir.kernels.proof import Shapes, disagreements
from kvir.kernels.triton import ops
from support import selection_cases, triton_cases
from support.score_cases import Shape


def run_on_gpu(late: Callable[[], bool]) -> tuple[int, dict[str, float | str]]:
    """Cases in random order until it is `late`: how many ran, and the outcomes of those that are wrong."""
    names = list(triton_cases.CASES)
    random.Random(0).shuffle(names)
    ours = ops.KERNELS
    ops.KERNELS = Kernels(
        "triton on a GPU", ours.append, through_gpu(ours.attend_decode), through_gpu(ours.attend_extend)
    )
    ran, wrong = 0, dict[str, float | str]()
    try:
        for name in names:
            if late():
                break
            wrong |= wrong_of({name: triton_cases.CASES[name]})
            ran += 1
    finally:
        ops.KERNELS = ours
    return ran, wrong


def wrong_of(cases: dict[str, Callable[[], float]]) -> dict[str, float | str]:
    """Run cases: the outcomes of those that are wrong."""
    outcomes = triton_cases.run(cases)
    return {name: x for name, x in outcomes.items() if not isinstance(x, float) or not x < 1}


def unequal_selections(device: str = "cuda") -> list[str]:
    """Terms for which more than one row in a hundred differs from the CPU's."""
    unequal: list[str] = []
    for name, keep in selection_cases.TERMS.items():
        rule, shape = selection_cases.rule_of(keep), Shape(403, 2, 3, 64)
        here = selection_cases.kept(rule, shape)
        there = selection_cases.kept(rule, shape, lambda x: x.to(device))
        pairs = [(set(rows.tolist()), set(there[unit].tolist())) for unit, rows in here.items()]
        if sum(len(a ^ b) for a, b in pairs) > 0.01 * sum(len(a) for a, _ in pairs):
            unequal.append(name)
    return unequal


def flashinfer_prefill() -> str:
    """Prefill by FlashInfer in the shapes of Llama-3.1-8B: `right`, or what is wrong."""
    shapes = Shapes(32, 8, 128, 16, torch.bfloat16, 128**-0.5, whole=True)
    try:
        kernels = with_prefill(ops.KERNELS, Prefill("cuda"))
        return "; ".join(disagreements(kernels, shapes, "cuda")) or "right"
    except Exception as error:
        return f"not run: {type(error).__name__}: {str(error)[:80]}"


def through_gpu(op: Callable[..., int]) -> Callable[..., int]:
    """The op on copies of its arguments; its last one is written and comes back."""

    def call(*arguments: object) -> int:
        moved = [on_gpu(x) for x in arguments]
        out, there = arguments[-1], moved[-1]
        assert isinstance(out, Tensor)
        assert isinstance(there, Tensor)
        holes = op(*moved)
        out.copy_(there)
        return holes

    return call


def on_gpu(value: object) -> object:
    match value:
        case Tensor():
            return value.cuda()
        case Cache():
            bias = None if value.bias is None else value.bias.cuda()
            return Cache(value.kv.cuda(), value.table.cuda(), bias)
        case Bounds():
            return Bounds(value.sink.cuda(), value.recent.cuda())
        case _:
            return value
