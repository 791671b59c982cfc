"""What a benchmark says while it runs, and its figures at the end."""

from __future__ import annotations

import sys
import time

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

    def show(self) -> None:
        print("\n".join(self._lines), flush=True)
