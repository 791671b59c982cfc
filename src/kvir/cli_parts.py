"""What commands share: how they end badly, models, reports on the terminal."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from kvir.lowering.stages import ModelFacts
    from kvir.policy_ir.diagnostic import Report


class Usage(Exception):
    """Bad input that is no diagnostic: its text is one line for standard error."""


def model_in(folder: str) -> ModelFacts:
    from kvir.lowering.model_facts import load_model

    return load_model(folder)


def print_report(report: Report) -> None:
    """Findings on standard error, as wide as it is; nothing is wrapped where it is no terminal."""
    from kvir.policy_ir import render

    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(render.full(report, color=color, columns=columns(sys.stderr)), end="", file=sys.stderr)


def columns(stream: TextIO) -> int | None:
    """The width of the terminal, or what `COLUMNS` says, as shells and rich have it."""
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return None
