"""`kvir build-kernels`: the GPU kernels of a plan, compiled ahead of time."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvir.cli_plan import read_layout

if TYPE_CHECKING:
    from kvir.kernels.flashinfer.modules import PrefillFacts
    from kvir.kernels.triton.build import AttentionFacts, Manifest
    from kvir.lowering.stages import LayoutPlan


def build_kernels(args: argparse.Namespace) -> int:
    """Write binaries and a manifest, and say what the kernels came to.  1 if any spills registers.

    A server without FlashInfer's modules compiles them itself, or does without, so they are no error.
    """
    from kvir.kernels.triton.build import build, default_folder

    layout = read_layout(args)
    folder = Path(args.output) if args.output else default_folder(Path(args.file), args.target)
    manifest = build([facts_of(layout, args.target)], args.target, folder)
    print("\n".join(table(manifest)))
    print(f"{len(manifest.kernels)} kernels for {args.target} in {folder}")
    prefill = prefill_facts_of(layout, args.target)
    if prefill is not None and not args.no_flashinfer:
        _build_modules(prefill, args.target, folder)
    return 1 if any(kernel.stack_bytes for kernel in manifest.kernels) else 0


def facts_of(layout: LayoutPlan, target: str) -> AttentionFacts:
    """What the kernels of a layout are compiled for; every batch that is captured as a graph counts."""
    import torch

    from kvir.kernels.triton.build import AttentionFacts
    from kvir.lowering.device_facts import DEVICES
    from kvir.lowering.graph_buckets import decode_buckets

    card = DEVICES[_card(target)]
    return AttentionFacts(
        kv_heads=layout.kv_heads,
        query_heads=layout.query_heads,
        head_dim=layout.head_dim,
        page_rows=layout.page_tokens,
        dtype=getattr(torch, layout.dtype),
        logit_cap="logit_cap" in layout.budgeted.bound.model.needs,
        selects=bool(layout.compact),
        batches=tuple(bucket.batch for bucket in decode_buckets(layout, card)),
    )


def prefill_facts_of(layout: LayoutPlan, target: str) -> PrefillFacts | None:
    """What FlashInfer's modules are compiled for, if the plan has layers for FlashInfer."""
    from kvir.kernels.flashinfer.modules import PrefillFacts
    from kvir.lowering.kernel_plan import kernel_choices

    chosen = kernel_choices(layout, _card(target))
    if not any(c.op == "attend_extend" and c.implementation == "flashinfer" for c in chosen):
        return None
    return PrefillFacts(layout.head_dim, layout.dtype, "logit_cap" in layout.budgeted.bound.model.needs)


def _build_modules(facts: PrefillFacts, target: str, folder: Path) -> None:
    from kvir.kernels.flashinfer.modules import ModulesError, build

    print("FlashInfer compiles its modules for prefill (several minutes)", flush=True)
    try:
        made = build([facts], target, folder)
    except ModulesError as error:
        print(f"warning: {error}; a server compiles them when it first calls them", file=sys.stderr)
        return
    print("\n".join(f"  {module.name}" for module in made.modules))


def _card(target: str) -> str:
    """A device with that GPU, by name."""
    from kvir.lowering.device_facts import DEVICES

    return next(name for name, device in DEVICES.items() if device.arch == target)


def table(manifest: Manifest) -> list[str]:
    """One line per kernel."""
    row = "{:<18} {:>5} {:>9} {:>12} {:>5} {:>11} {:>14}"
    head = ("kernel", "warps", "registers", "shared bytes", "stack", "async loads", "blocks per SM")
    rows = [
        (k.kernel, k.warps, k.registers, k.shared_bytes, k.stack_bytes, k.async_loads, k.blocks)
        for k in manifest.kernels
    ]
    return [row.format(*line) for line in (head, *rows)]
