"""A layout as tables for people: what each layer keeps, what a request costs, and what fits."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from kvir.lowering import footprint
from kvir.lowering.device_facts import DeviceFacts
from kvir.lowering.footprint import LayerCost
from kvir.lowering.places import ranges
from kvir.lowering.show_kernels import graphs, kernels
from kvir.lowering.show_selections import fits, prompts, row_words, selections
from kvir.lowering.show_table import figures
from kvir.lowering.stage_words import words
from kvir.lowering.stages import LayoutPlan, Retention
from kvir.lowering.tensor_parallel import rank_layouts
from kvir.lowering.units import human_bytes

DEFAULT_LENGTHS = (1 << 10, 4 << 10, 16 << 10, 32 << 10, 128 << 10)
MAX_CLASSES = 12  # shown; the rest is counted


def show(
    layout: LayoutPlan,
    console: Console,
    *,
    memory_bytes: int | None = None,
    lengths: Sequence[int] = (),
    rank_count: int = 1,
    device: DeviceFacts | None = None,
) -> None:
    """Print every table.

    `lengths` in tokens; by default some up to the model's context.  `memory_bytes` is of one rank, and what
    fits is what fits on the fullest one.  ValueError if heads do not divide over the ranks.
    """
    model = layout.budgeted.bound.model
    if not lengths:
        lengths = [n for n in DEFAULT_LENGTHS if n <= model.context_tokens] or [model.context_tokens]
    policy = layout.budgeted.bound.verified.policy
    console.print(
        f"[bold]{policy.name}[/bold] on {model.architecture or model.arch}, {layout.dtype}", highlight=False
    )
    console.print(
        f"{len(model.layers)} layers x {layout.kv_heads} KV heads of {layout.head_dim}; "
        f"pages of {layout.page_tokens} tokens; context {model.context_tokens:,}\n",
        highlight=False,
    )
    console.print(_layers(layout))
    if any(c.window_pages is not None for c in layout.classes):
        console.print(_classes(layout))
    if layout.compact:
        console.print(selections(layout, lengths))
        console.print(prompts(layout, lengths, device))
    else:
        console.print(_requests(layout, lengths, device))
    fullest = layout
    if rank_count > 1:
        ranks = rank_layouts(layout, rank_count)
        fullest = max(ranks, key=lambda rank: footprint.peak_bytes(rank, lengths[-1]))
        console.print(_ranks(ranks, lengths[-1]))
    if memory_bytes is not None:
        console.print(_capacity(fullest, memory_bytes, lengths))
    if device is not None and device.kind == "cuda":
        console.print(kernels(fullest, device))
        console.print(graphs(fullest, device))


def _layers(layout: LayoutPlan) -> Table:
    """Consecutive layers that keep the same share a row; figures are of one layer."""
    budgeted, costs = layout.budgeted, footprint.layer_costs(layout)
    layers, context = budgeted.bound.model.layers, budgeted.bound.model.context_tokens
    if layout.compact:
        title = "Layers (figures of each one, when its selections are done)"
        table = figures(title, "layers", "<keep", "per new token", "and besides")
    else:
        table = figures("Layers (figures of each one)", "layers", "<keep", "bytes/token", "windows hold")
    rows: list[tuple[list[int], tuple[str, LayerCost]]] = []
    for i, cost in enumerate(costs):
        keep = _row_words(budgeted.prefill[i], context)
        if budgeted.decode[i] != budgeted.prefill[i]:
            keep = f"prefill {keep}\ndecode {_row_words(budgeted.decode[i], context)}"
        if rows and rows[-1][1] == (keep, cost):
            rows[-1][0].append(layers[i].layer_id)
        else:
            rows.append(([layers[i].layer_id], (keep, cost)))
    for ids, (keep, cost) in rows:
        fixed = human_bytes(cost.window_bytes) if cost.window_bytes else "-"
        table.add_row(ranges(ids), keep, f"{cost.bytes_per_token:,}", fixed)
    total = sum(c.bytes_per_token for c in costs)
    full = layout.unit_count * layout.head_page_bytes // layout.page_tokens
    table.add_section()
    table.add_row(
        "all",
        f"{total / full:.1%} of the {full:,} of full KV",
        f"{total:,}",
        human_bytes(sum(c.window_bytes for c in costs)),
    )
    return table


def _row_words(row: Sequence[Retention], context: int) -> str:
    """What the heads of one layer keep: each alike group if there are two at most, else counts and bounds."""
    if (by_score := row_words(row, context)) is not None:
        return by_score
    groups: dict[Retention, list[int]] = {}
    for head, retention in enumerate(row):
        groups.setdefault(retention, []).append(head)
    if len(groups) == 1:
        return words(row[0])
    if len(groups) == 2:
        return "\n".join(f"heads {ranges(heads)}: {words(r)}" for r, heads in groups.items())
    full = sum(r.recent_tokens is None for r in row)
    windows = sorted(r.recent_tokens for r in row if r.recent_tokens is not None)
    sinks = sorted({r.sink_tokens for r in row if r.recent_tokens is not None})
    sink = f"sink {ranges(sinks)}, " if sinks != [0] else ""
    return f"{full} full, {len(windows)} with {sink}recent {windows[0]:,}..{windows[-1]:,}"


def _classes(layout: LayoutPlan) -> Table:
    table = figures(
        "Residency classes", "class", "units", "sink pages", "window pages", "in decode", "holds at most"
    )
    for i, c in enumerate(layout.classes[:MAX_CLASSES]):
        span = c.prefill
        decode = "same" if c.decode is None else f"{c.decode.sink_pages} + {c.decode.window_pages}"
        pages = None if span.window_pages is None else span.sink_pages + span.window_pages + 1
        table.add_row(
            str(i),
            f"{len(c.units):,}",
            "-" if pages is None else f"{span.sink_pages:,}",
            "all" if pages is None else f"{span.window_pages:,}",
            decode,
            f"every row{' until selected' if c.selects else ''}"
            if pages is None
            else f"{pages * layout.page_tokens:,} rows",
        )
    hidden = layout.classes[MAX_CLASSES:]
    if hidden:
        table.add_row(f"{len(hidden)} more", f"{sum(len(c.units) for c in hidden):,}", "", "", "", "")
    return table


def _requests(layout: LayoutPlan, lengths: Sequence[int], device: DeviceFacts | None) -> Table:
    """`read` is the least time in which the device's memory delivers what a decode step attends to."""
    phased = any(c.decode is not None for c in layout.classes)
    rate = device.bytes_per_second if device is not None else None
    columns = ["length", "resident", "at most", "full KV", "share"]
    if phased:
        columns.insert(1, "in decode")
    if rate is not None:
        columns.append("read")
    table = figures("One request", *columns)
    for n in lengths:
        full, peak = footprint.full_bytes(layout, n), footprint.peak_bytes(layout, n)
        resident = footprint.resident_bytes(layout, n)
        decode = footprint.resident_bytes(layout, n, "decode")
        cells = [f"{n:,}", human_bytes(resident), human_bytes(peak), human_bytes(full), f"{peak / full:.1%}"]
        if phased:
            cells.insert(1, human_bytes(decode))
        if rate is not None:
            cells.append(f"{decode / rate * 1e3:.3f} ms")
        table.add_row(*cells)
    return table


def _ranks(ranks: Sequence[LayoutPlan], n: int) -> Table:
    table = figures(
        f"Over {len(ranks)} ranks", "rank", "units", "bytes/token", "windows hold", f"at {n:,} tokens"
    )
    for i, rank in enumerate(ranks):
        costs = footprint.layer_costs(rank)
        table.add_row(
            str(i),
            f"{rank.unit_count:,}",
            f"{sum(c.bytes_per_token for c in costs):,}",
            human_bytes(sum(c.window_bytes for c in costs)),
            human_bytes(footprint.peak_bytes(rank, n)),
        )
    return table


def _capacity(layout: LayoutPlan, memory_bytes: int, lengths: Sequence[int]) -> Table:
    pool = footprint.pool_size(layout, memory_bytes)
    context = layout.budgeted.bound.model.context_tokens
    table_bytes = pool.logical_pages * layout.table_bytes_per_page
    table = figures(
        f"In {human_bytes(memory_bytes)}, {human_bytes(table_bytes)} of it page table",
        "requests at once",
        "this plan",
        "full KV",
        "ratio",
    )
    full_pages = memory_bytes // (layout.unit_count * layout.head_page_bytes)  # full KV needs no page table
    for n in lengths:
        full = full_pages // footprint.ceil_div(n, layout.page_tokens)
        if layout.compact:
            fits(layout, table, n, memory_bytes, full)
            continue
        count = footprint.concurrency(layout, n, memory_bytes)
        table.add_row(f"of {n:,} tokens", f"{count:,}", f"{full:,}", f"{count / full:.2f}x" if full else "-")
    longest, full_longest = footprint.longest_context(layout, memory_bytes), full_pages * layout.page_tokens
    table.add_section()
    table.add_row(
        "longest context" + (" *" if max(longest, full_longest) > context else ""),
        f"{longest:,}",
        f"{full_longest:,}",
        f"{longest / full_longest:.2f}x" if full_longest else "-",
    )
    if max(longest, full_longest) > context:
        table.caption = f"* memory alone; the model itself ends at {context:,}"
        table.caption_justify = "left"
    return table
