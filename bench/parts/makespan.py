"""How well a work list fills a GPU, by simulation: nothing here has run on one."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from kvir.kernels.catalog import PLAN_BLOCKS, Tile

ITEM_OVERHEAD_ROWS = 96  # what starting an item costs, in rows that could have been read meanwhile
WINDOW_ROWS = 1088
SIZE_CLASSES = 16  # as in kernels/triton/work.py
MIN_CHUNK_ROWS = 128
STRETCHES = 4

# (requests, share of heads that keep everything): batches of 16k to 32k tokens, 8 KV heads
RAGGED = ((8, 0.25), (32, 0.25), (128, 0.25), (32, 0.10), (32, 1.0))


def ragged_rows(batch: int, full_share: float, kv_heads: int = 8, seed: int = 0) -> list[int]:
    """Visible rows of every lane; heads that do not keep all have a window."""
    rng = random.Random(seed)
    rows: list[int] = []
    for _ in range(batch):
        context = rng.randint(16_384, 32_768)
        rows += [context if rng.random() < full_share else WINDOW_ROWS for _ in range(kv_heads)]
    return rows


def slots_of(multiprocessors: int, tile: Tile) -> int:
    return multiprocessors * tile.blocks


def chunk_rows(rows: Sequence[int], slots: int, block_rows: int) -> int:
    """Rows of a full item."""
    even = max(MIN_CHUNK_ROWS, -(-sum(rows) // (slots * block_rows)) * block_rows)
    for i in range(STRETCHES + 1):
        longer = -(-(even + even * i // (4 * STRETCHES)) // block_rows) * block_rows
        if sum(-(-n // longer) for n in rows) <= slots:
            return longer
    return even


def item_rows(rows: Sequence[int], slots: int, block_rows: int) -> list[int]:
    """Rows of each item, in the order in which `plan_work` has them."""
    chunk = chunk_rows(rows, slots, block_rows)
    full = [chunk] * sum(n // chunk for n in rows)
    short = [n % chunk for n in rows if n % chunk]
    short.sort(key=lambda left: -((left * SIZE_CLASSES - 1) // chunk))
    return full + short


def flashinfer_items(rows: Sequence[int], multiprocessors: int) -> tuple[list[int], int]:
    """What FlashInfer 0.7's planner makes of them with tensor cores, and how many run at once: the smallest
    chunk whose items do not exceed two per multiprocessor, no split where the sequences alone do.
    """
    most = PLAN_BLOCKS * multiprocessors
    low, high = MIN_CHUNK_ROWS, max(rows)
    while low < high:
        chunk = (low + high) // 2
        if sum(-(-n // chunk) for n in rows) > most:
            low = chunk + 1
        else:
            high = chunk
    return [min(low, n - start) for n in rows for start in range(0, n, low)], most


def makespan_rows(items: Sequence[int], slots: int) -> int:
    """Time of the last item, in rows: whoever is free takes the next one."""
    free_at = [0] * min(slots, max(1, len(items)))
    for rows in items:
        heapq.heappush(free_at, heapq.heappop(free_at) + rows + ITEM_OVERHEAD_ROWS)
    return max(free_at)


def over_ideal(items: Sequence[int], slots: int) -> float:
    """Makespan over the time that all rows would take, spread evenly and without overhead."""
    return makespan_rows(items, slots) / (sum(items) / slots)
