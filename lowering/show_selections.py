"""Tables of plans that select rows by score: what stays, what a prompt costs before and after, what fits."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from kvir.lowering import footprint
from kvir.lowering.compact import runs_in_prefill
from kvir.lowering.device_facts import DeviceFacts
from kvir.lowering.quota import first_run, kept_rows
from kvir.lowering.show_table import figures
from kvir.lowering.spans import Bounds
from kvir.lowering.stage_words import words
from kvir.lowering.stages import CompactClass, LayoutPlan, Retention, Selection
from kvir.lowering.units import human_bytes

MAX_CLASSES = 12  # shown; the rest is counted
MAX_LENGTHS = 4  # columns of kept rows


def selections(layout: LayoutPlan, lengths: Sequence[int]) -> Table:
    """What is left of prompts of some lengths, in rows of one unit."""
    shown = list(lengths)[-MAX_LENGTHS:]
    table = figures("Rows that selections leave in a unit", "units", "<keep", *(f"of {n:,}" for n in shown))
    for c in layout.compact[:MAX_CLASSES]:
        for selection, retention in ((c.prefill.selection, c.prefill), (c.decode.selection, c.decode)):
            if selection is not None:
                cells = [_kept(selection, c, n) for n in shown]
                table.add_row(f"{len(c.units):,}", words(retention), *cells)
    hidden = layout.compact[MAX_CLASSES:]
    if hidden:
        table.add_row(f"{sum(len(c.units) for c in hidden):,}", f"in {len(hidden)} more classes")
    return table


def _kept(selection: Selection, c: CompactClass, n: int) -> str:
    if c.prefill.selection is selection and not runs_in_prefill(selection, n):
        return "all"
    return bounds(kept_rows(first_run(selection, n, n)))


def prompts(layout: LayoutPlan, lengths: Sequence[int], device: DeviceFacts | None) -> Table:
    """A prompt while it is read, and when its selections are done; `read` as for other plans."""
    rate = device.bytes_per_second if device is not None else None
    columns = ["prompt", "peak", "when done", "full KV", "share"]
    table = figures("One request", *columns, *(["read"] if rate is not None else []))
    for n in lengths:
        length = footprint.done_length(layout, n)
        full, peak = footprint.full_bytes(layout, n), footprint.peak_bytes(layout, length, n)
        done = footprint.done_bytes(layout, length, n)
        cells = [f"{n:,}", human_bytes(peak), _bytes(done), human_bytes(full), f"{done.most / full:.1%}"]
        if rate is not None:
            cells.append(f"{done.most / rate * 1e3:.3f} ms")
        table.add_row(*cells)
    return table


def fits(layout: LayoutPlan, table: Table, n: int, memory_bytes: int, full: int) -> None:
    """How many prompts fit while all are read, and while one is read and the others are done."""
    for words_, count in (
        (f"of {n:,} tokens, all in prefill", footprint.concurrency(layout, n, memory_bytes)),
        (f"of {n:,} tokens, one in prefill", footprint.decoding(layout, n, memory_bytes)),
    ):
        table.add_row(words_, f"{count:,}", f"{full:,}", f"{count / full:.2f}x" if full else "-")


def row_words(row: Sequence[Retention], context: int) -> str | None:
    """Heads of one layer in a few words where some select and not all are alike, else None."""
    chosen = [r.selection for r in row if r.selection is not None]
    if not chosen or len(set(row)) == 1:
        return None
    full = sum(r.selection is None and r.recent_tokens is None for r in row)
    windows = len(row) - len(chosen) - full
    parts = [f"{full} full"] if full else []
    parts += [f"{windows} with a window"] if windows else []
    kept = [kept_rows(first_run(s, context, context)) for s in chosen]
    rows = Bounds(min(b.least for b in kept), max(b.most for b in kept))
    return ", ".join([*parts, f"{len(chosen)} with {bounds(rows)} rows by score"])


def bounds(value: Bounds) -> str:
    return f"{value.most:,}" if value.exact else f"{value.least:,}..{value.most:,}"


def _bytes(value: Bounds) -> str:
    least, most = human_bytes(value.least), human_bytes(value.most)
    return most if least == most else f"{least} - {most}"
