"""Pages of one unit that keeps rows by position.  `n` is a length in tokens, P is `page_tokens`."""

from __future__ import annotations

from typing import NamedTuple

from kvir.lowering.stages import PageSpan


class Bounds(NamedTuple):
    """A count that lies in `least..most`, both included."""

    least: int
    most: int

    @property
    def exact(self) -> bool:
        return self.least == self.most


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def span_pages(span: PageSpan, page_tokens: int, n: int) -> int:
    """Head-pages that one unit holds at length `n`."""
    pages = ceil_div(n, page_tokens)
    if span.window_pages is None:
        return pages
    start = max(span.sink_pages, n // page_tokens - span.window_pages)
    return min(span.sink_pages, pages) + max(0, pages - start)


def span_peak_pages(span: PageSpan, page_tokens: int, n: int) -> int:
    """The most head-pages that one unit holds at any length up to `n` (for P >= 2)."""
    pages = ceil_div(n, page_tokens)
    if span.window_pages is None:
        return pages
    return min(pages, span.sink_pages + span.window_pages + 1)


def pages_since(start: int, n: int, page_tokens: int) -> int:
    """Pages from the page floor of `start` to `n`."""
    return ceil_div(n, page_tokens) - start // page_tokens


def most_pages(tokens: int, page_tokens: int) -> int:
    """The most pages that `tokens` consecutive tokens, and the rest of the page in which they begin,
    touch."""
    return (tokens + page_tokens - 2) // page_tokens + 1
