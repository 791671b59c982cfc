"""Prefill by FlashInfer where a layer's heads keep every row; by Triton where it cannot, or is wrong here."""

from __future__ import annotations

import logging
import os

from kvir.kernels import dispatch
from kvir.kernels.flashinfer.prefill import Prefill, with_prefill
from kvir.kernels.proof import disagreements
from kvir.lowering.kernel_plan import prefill_is_whole
from kvir.lowering.stages import ExecutionPlan
from kvir.sglang_ext.backend import KERNELS_VARIABLE
from kvir.sglang_ext.pool import KvirPool
from kvir.sglang_ext.selfcheck import shapes_of

NAME = "flashinfer"

logger = logging.getLogger(__name__)


class WholePrefill:
    """Layers (by index) that FlashInfer computes; the others are not its business."""

    def __init__(self, layers: frozenset[int], prefill: Prefill) -> None:
        self.layers, self.prefill = layers, prefill

    @staticmethod
    def of(pool: KvirPool) -> WholePrefill | None:
        """If there are such layers, and FlashInfer is there and right, on this device and in their shapes."""
        layers = flashinfer_layers(pool.plan)
        if not layers:
            return None
        try:
            prefill = Prefill(pool.kv.device)
            kernels = with_prefill(dispatch.get("triton"), prefill)
            found = disagreements(kernels, shapes_of(pool, whole=True), pool.kv.device)
        except Exception as error:  # what may fail to import, compile or launch is not ours
            prefill, found = None, [f"{type(error).__name__}: {str(error)[:200]}"]
        if prefill is None or found:
            logger.warning("kvir: prefill by Triton, FlashInfer is not used: %s", "; ".join(found))
            return None
        return WholePrefill(layers, prefill)


def flashinfer_layers(plan: ExecutionPlan) -> frozenset[int]:
    """Those that the plan gives to FlashInfer; all that it could compute, if the variable names it."""
    named = os.environ.get(KERNELS_VARIABLE)
    every = range(len(plan.model.layers))
    if named == NAME:
        return frozenset(i for i in every if prefill_is_whole(plan.budgeted, i))
    if named:
        return frozenset()
    chosen = [c for c in plan.choices if c.op == "attend_extend" and c.implementation == NAME]
    ids = {i for c in chosen for i in (c.layers or [layer.layer_id for layer in plan.model.layers])}
    return frozenset(i for i in every if plan.model.layers[i].layer_id in ids)
