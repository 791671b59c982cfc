"""What a benchmark says while it runs, and its figures at the end."""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import sys
import time
from collections.abc import Callable, Mapping

from evaluation.oracle import LOGPROB_TOLERANCE, Agreement
from evaluation.rounding import Ties
from evaluation.server import ServerError

STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", file=sys.stderr, flush=True)


class Figures:
    """What was measured, in order, and whether all of it is as it must be."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self.ok = True

    def add(self, name: str, value: object, *, ok: bool = True) -> None:
        line = f"bench: {name} = {value}" + ("" if ok else "  (WRONG)")
        self._lines.append(line)
        self.ok &= ok
        say(line)

    def agreement(self, name: str, agreement: Agreement, explain: Callable[[], Ties] | None = None) -> None:
        """`explain`: asks whether requests that are off by more than rounding are ties that it decided."""
        equal = agreement.equal == agreement.tokens and not agreement.nan
        self.add(f"{name}_tokens_equal", f"{agreement.equal}/{agreement.tokens}", ok=equal)
        close = agreement.worst_logprob <= LOGPROB_TOLERANCE
        if not close and equal and explain is not None:
            found = explain()
            close = found.explained == found.off
            self.add(f"{name}_ties_decided_by_rounding", found, ok=close)
        self.add(f"{name}_worst_logprob", f"{agreement.worst_logprob:.1e}", ok=close)

    def show(self) -> None:
        print("\n".join(self._lines), flush=True)


def run_parts(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    available: Mapping[str, Callable[[], None]],
    figures: Figures,
) -> None:
    """The parts that were named, or all; then the figures.  Ends the process: 1 if anything is wrong.

    `options.parts` are names of parts, or patterns (`*`) of names; `options.list` asks for the names alone.
    """
    if options.list:
        print("\n".join(available))
        return
    named = {word: fnmatch.filter(list(available), word) for word in options.parts}
    if unknown := [word for word, parts in named.items() if not parts]:
        parser.error(f"no such part: {', '.join(unknown)}; --list names them")
    for part in itertools.chain(*named.values()) if named else available:
        say(part)
        try:
            available[part]()
        except ServerError as error:
            say(str(error))
            figures.add(f"{part.replace(':', '_')}_server", "failed", ok=False)
    figures.show()
    sys.exit(0 if figures.ok else 1)
