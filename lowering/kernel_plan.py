"""LayoutPlan -> KernelPlan: one implementation per op from the catalogue, and why not the others (KV5xx)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvir.kernels.catalog import CATALOG, OPS
from kvir.lowering.device_facts import DEVICES
from kvir.lowering.stages import KernelChoice, KernelPlan, LayoutPlan
from kvir.policy_ir.diagnostic import Report


@dataclass(frozen=True)
class ChooseKernels:
    name: ClassVar[str] = "kernels"
    device: str
    report: Report

    def __call__(self, layout: LayoutPlan) -> KernelPlan:
        if self.device not in DEVICES:
            self.report.error(
                "KV502",
                f"unknown device `{self.device}`",
                None,
                help=f"known devices: {', '.join(DEVICES)}",
            )
            self.report.raise_if_errors()
        choices = [choose(op, self.device, layout) for op in OPS]
        for choice in choices:
            if not choice.implementation:
                reasons = "; ".join(f"`{name}` {reason}" for name, reason in choice.rejected)
                self.report.error(
                    "KV501",
                    f"no kernel for `{choice.op}` of this model: {reasons}",
                    None,
                    help="serve this model without `--kv-ir`, or choose another dtype or device",
                )
        return KernelPlan(layout=layout, device=self.device, choices=tuple(choices))


def choose(op: str, device: str, layout: LayoutPlan) -> KernelChoice:
    """The first implementation of `op` that can run; an empty name if none can."""
    chosen = ""
    rejected: list[tuple[str, str]] = []
    for x in CATALOG[op]:
        needs = layout.budgeted.bound.model.needs if op.startswith("attend") else ()
        reason = x.refusal(DEVICES[device].kind, layout.dtype, layout.head_dim, needs)
        if reason is None and chosen:
            reason = f"comes after `{chosen}`"
        if reason is None:
            chosen = x.name
        else:
            rejected.append((x.name, reason))
    return KernelChoice(op=op, implementation=chosen, rejected=tuple(rejected))
