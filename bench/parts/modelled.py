"""Modelled time of a decode step on GPUs: arithmetic from the vendors' data sheets, nothing was measured.

A step reads the weights once and the rows that the policy keeps.  The floor is those bytes over the speed of
the memory.  The model adds what is known to come on top: items that end unevenly (`makespan.py`), partial
results, page ids, and launches.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from bench.parts.makespan import item_rows, over_ideal, slots_of
from kvir.kernels.catalog import decode_tile
from kvir.lowering.device_facts import DeviceFacts
from kvir.lowering.stages import LayoutPlan, Retention

REACHED = 0.9  # of the data sheet's speed by a copy
LAUNCH_SECONDS = 2e-6  # of one kernel in a graph
LAUNCHES = 3  # of a layer: append, items, merge
PLAN_LAUNCHES = 3  # of a step


@dataclass(frozen=True)
class Step:
    """Seconds of one decode step."""

    floor: float
    full_floor: float  # with full KV
    attention_floor: float
    attention: float

    @property
    def modelled(self) -> float:
        return self.floor - self.attention_floor + self.attention


def weight_bytes(folder: Path, kv_heads: int, head_dim: int) -> int:
    """Of a dense decoder in 16 bits: what one step reads; the embedding is read by rows."""
    config = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    query = config["num_attention_heads"] * head_dim
    attention = hidden * (2 * query + 2 * kv_heads * head_dim)
    return 2 * (
        layers * (attention + 3 * hidden * config["intermediate_size"]) + hidden * config["vocab_size"]
    )


def decode_step(layout: LayoutPlan, device: DeviceFacts, weights: int, batch: int, tokens: int) -> Step:
    """`batch` requests of `tokens` tokens under a policy of sinks and windows."""
    assert device.bytes_per_second is not None
    assert device.multiprocessors is not None
    speed = device.bytes_per_second * REACHED
    group = layout.query_heads // layout.kv_heads
    row_bytes = layout.head_page_bytes // layout.page_tokens
    tile = decode_tile(layout.head_dim, group, layout.dtype, device.arch)
    slots = slots_of(device.multiprocessors, tile)
    floor = full = attention = 0.0
    for layer in layout.budgeted.decode:
        kept = [_rows(unit, tokens) for unit in layer]
        rows = kept * batch
        items = item_rows(rows, slots, tile.rows)
        own = sum(rows) * row_bytes / speed
        merged = sum(1 for n in rows if n > items[0]) and len(items)
        extra = merged * 2 * group * (layout.head_dim + 1) * 4 + sum(rows) // layout.page_tokens * 8
        attention += own * over_ideal(items, slots) + extra / speed + LAUNCHES * LAUNCH_SECONDS
        floor += own
        full += batch * len(kept) * tokens * row_bytes / speed
    attention += PLAN_LAUNCHES * LAUNCH_SECONDS
    return Step(weights / speed + floor, weights / speed + full, floor, attention)


def _rows(unit: Retention, tokens: int) -> int:
    if unit.recent_tokens is None:
        return tokens
    return min(tokens, unit.sink_tokens + unit.recent_tokens)
