"""What the runtime remembers of a running request."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvir.sglang_ext.geometry import IntArray

# attribute of SGLang's Req: the page at which a match of this prompt found the windows gone
BRANCH_PAGE = "kvir_branch_page"


@dataclass
class Landmarks:
    """Page positions whose preceding windows are worth keeping: they make a prefix findable again.

    `branch_page`: another prompt shares the pages before it, but their windows are gone; the window before it
    is kept while this request computes it again.  `prompt_page`: the page floor of this request's prompt.
    """

    prompt_page: int = 0
    branch_page: int | None = None

    def in_tail(self, index: IntArray, window_pages: int) -> np.ndarray:
        """Which page indices lie in the window before a landmark."""
        tail = (index < self.prompt_page) & (index >= self.prompt_page - window_pages)
        return tail | self.before_branch(index, window_pages)

    def before_branch(self, index: IntArray, window_pages: int) -> np.ndarray:
        if self.branch_page is None:
            return np.zeros(len(index), bool)
        return (index < self.branch_page) & (index >= self.branch_page - window_pages)


@dataclass
class RequestState:
    """Keyed by `id(kv)`; holding the record keeps that id unique.  SGLang knows no row number yet when the
    state opens, and request ids may repeat.
    """

    kv: object
    pages: list[int]  # logical page of every P tokens
    tree_pages: int  # the first `tree_pages` of them are owned by the prefix tree
    landmarks: Landmarks
    first: IntArray = field(
        default_factory=lambda: np.empty(0, np.int64)
    )  # [C] first covered page, sinks aside
    page_floor: int = 0  # pages of the length that `first` was computed for
    held: list[tuple[int, IntArray]] = field(
        default_factory=list[tuple[int, IntArray]]
    )  # branch tails not yet adopted
    rid: str = ""
    prompt_tokens: int = 0  # tokens to prefill this time (after a retraction: prompt and outputs so far)
    max_new_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
