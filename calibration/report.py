"""Progress while a calibration runs, and its summary."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from kvir.calibration.result import Calibration


class Bar:
    """A bar per phase on standard error, with the time left."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._progress = Progress(*columns, *times, console=Console(stderr=True))

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()

    def phase(self, name: str, steps: int) -> Callable[[], None]:
        """Begin a phase; call the result once per step."""
        task = self._progress.add_task(name, total=steps)
        return lambda: self._progress.advance(task)


def print_summary(found: Calibration, console: Console | None = None) -> None:
    """The grid as a table, the chosen point marked."""
    table = Table(title=f"{found.inputs.arch}, {found.inputs.counted_tokens} tokens", title_justify="left")
    table.add_column("")
    table.add_column("policy")
    for name in ("rows kept", "min-head cosine", "error / residual", "held-out loss", "against full"):
        table.add_column(name, justify="right")
    if found.loss_full is not None:
        table.add_row("", "full KV", "100.0%", "1.0000", "0.00", f"{found.loss_full:.4f}", "")
    for index, point in enumerate(found.points):
        loss = against = ""
        if point.loss is not None and found.loss_full is not None:
            loss, against = f"{point.loss:.4f}", f"{point.loss - found.loss_full:+.4f}"
        table.add_row(
            "*" if index == found.chosen else "",
            point.name,
            f"{point.kept_share:.1%}",
            f"{point.minimum_head_score:.4f}",
            "" if point.error is None else f"{point.error:.2f}",
            loss,
            against,
        )
    # a file or a pipe has no width of its own
    (console or Console(width=None if sys.stdout.isatty() else 120)).print(table)
