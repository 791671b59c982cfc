"""What a KV head may be given: the first rows and the last rows, or all.  The codebook of a calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """`sink_tokens` first rows and `recent_tokens` last ones, the query's own included; None keeps all."""

    recent_tokens: int | None
    sink_tokens: int = 0

    def rows(self, context_tokens: int) -> int:
        """Rows kept of a context."""
        if self.recent_tokens is None:
            return context_tokens
        return min(context_tokens, self.sink_tokens + self.recent_tokens)

    def __str__(self) -> str:
        if self.recent_tokens is None:
            return "full"
        return f"{self.sink_tokens}+{self.recent_tokens}" if self.sink_tokens else str(self.recent_tokens)


FULL = Candidate(None)

Codebook = tuple[Candidate, ...]


def codebook(recent_tokens: Sequence[int], sink_tokens: Sequence[int], context_tokens: int) -> Codebook:
    """Every pair, cheapest first (of equal cost the one with fewer sinks), `full` last.

    What would keep a whole context is left out: it is `full`.

    Raises:
        ValueError: a number out of range.
    """
    if any(tokens < 1 for tokens in recent_tokens) or any(tokens < 0 for tokens in sink_tokens):
        raise ValueError("windows are at least 1 token, sinks at least 0")
    pairs = {Candidate(recent, sink) for recent in recent_tokens for sink in sink_tokens or (0,)}
    cut = [pair for pair in pairs if pair.rows(context_tokens) < context_tokens]
    return (*sorted(cut, key=lambda c: (c.rows(context_tokens), c.sink_tokens)), FULL)
