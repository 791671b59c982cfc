"""The kernels and decode graphs of a card as tables for people."""

from __future__ import annotations

from rich.table import Table

from kvir.lowering.device_facts import DeviceFacts
from kvir.lowering.graph_buckets import decode_buckets
from kvir.lowering.kernel_plan import kernel_choices
from kvir.lowering.places import ranges
from kvir.lowering.show_table import figures
from kvir.lowering.stage_words import tile_words
from kvir.lowering.stages import LayoutPlan
from kvir.lowering.units import human_bytes

GRAPHS_SHOWN = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def kernels(layout: LayoutPlan, device: DeviceFacts) -> Table:
    """What each op runs as, and why not otherwise."""
    table = figures(f"Kernels on {device.name}", "op", "<layers", "<kernel", "<not taken")
    for choice in kernel_choices(layout, device.name):
        name = choice.implementation or "none"
        if choice.tile is not None:
            name += f"\n{tile_words(choice.tile)}"
        if not choice.built:
            name += "\nnot built yet"
        reasons = "\n".join(f"{other} {reason}" for other, reason in choice.rejected)
        where = "all" if choice.layers is None else ranges(choice.layers)
        table.add_row(choice.op, where, name, reasons)
    return table


def graphs(layout: LayoutPlan, device: DeviceFacts) -> Table:
    """Batches that are captured; of the buckets between those shown there are more."""
    buckets = decode_buckets(layout, device, kernel_choices(layout, device.name))
    table = figures(f"Decode graphs ({len(buckets)} batch sizes)", "batch", "splits", "static buffers")
    for bucket in buckets:
        if bucket.batch in GRAPHS_SHOWN:
            table.add_row(str(bucket.batch), str(bucket.splits), human_bytes(bucket.static_bytes))
    return table
