"""KernelPlan -> GraphBuckets: the batch sizes that are captured as graphs.  A CPU has none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvir.lowering.stages import GraphBuckets, KernelPlan


@dataclass(frozen=True)
class ChooseBuckets:
    name: ClassVar[str] = "buckets"

    def __call__(self, kernels: KernelPlan) -> GraphBuckets:
        return GraphBuckets(kernels=kernels, decode=())
