"""The summary of a calibration as tables."""

from __future__ import annotations

import sys
from collections import Counter

from rich.console import Console
from rich.table import Table

from kvir.calibration.polykv.result import Point, PolyCalibration, interval


def print_summary(found: PolyCalibration, console: Console | None = None) -> None:
    """What was chosen how often; held-out loss of the plan against every single method and full KV."""
    # a file or a pipe has no width of its own
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    console.print(_choices(found))
    if found.full is not None and found.plan is not None:
        console.print(_losses(found, found.full, found.plan))
        if found.gap_recovered is not None and found.best_single is not None:
            console.print(
                f"of the loss between {found.best_single.name} and full KV the plan recovers "
                f"{found.gap_recovered:.1%}"
            )


def _choices(found: PolyCalibration) -> Table:
    units = [choice for row in found.choices for choice in row]
    context, unit = found.inputs.context_tokens, "KV heads" if found.inputs.grain == "head" else "layers"
    table = Table(title=f"{found.inputs.arch}, prompts of {context} tokens", title_justify="left")
    for name in ("method", unit, "mean rows", "least", "most"):
        table.add_column(name, justify="left" if name == "method" else "right")
    whole = [choice.rows for choice in units if choice.rows >= context]
    rows = {
        m: [c.rows for c in units if c.method == m and c.rows < context] for m in range(len(found.methods))
    }
    for method, _ in Counter(c.method for c in units if c.rows < context).most_common():
        counts = rows[method]
        mean = sum(counts) / len(counts)
        name = found.methods[method].name
        table.add_row(name, str(len(counts)), f"{mean:.0f}", str(min(counts)), str(max(counts)))
    if whole:
        table.add_row("everything", str(len(whole)), *[str(context)] * 3)
    return table


def _losses(found: PolyCalibration, full: Point, plan: Point) -> Table:
    table = Table(title=f"held-out text, {len(full.losses)} samples", title_justify="left")
    table.add_column("policy")
    for name in ("rows kept", "loss", "against full", "+-"):
        table.add_column(name, justify="right")
    table.add_row("full KV", "100.0%", f"{full.loss:.4f}", "", "")
    ranked = sorted(found.singles, key=lambda point: point.loss)
    for point in (plan, *ranked):
        mean, half = interval(point.losses, full.losses)
        table.add_row(
            "[bold]plan[/bold]" if point is plan else f"{point.name} everywhere",
            f"{point.kept_share:.1%}",
            f"{point.loss:.4f}",
            f"{mean:+.4f}",
            "" if half != half else f"{half:.4f}",
        )
    return table
