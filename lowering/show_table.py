"""How tables of the planner look."""

from __future__ import annotations

from rich import box
from rich.table import Table


def figures(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are figures, unless the name starts with `<`."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        left = i == 0 or column.startswith("<")
        table.add_column(column.removeprefix("<"), justify="left" if left else "right", overflow="fold")
    return table
