"""The head-pages of units that select by score, in the course of one request: prompt, selections, growth.

`compact.py` says what one selection leaves, and when a unit stays dense.  `n` is the length of a sequence in
tokens, `prompt` of its prompt, P is `page_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import assert_never

from kvir.lowering.compact import (
    NO_ROWS,
    block_tokens,
    compact_pages,
    first_drop,
    group_count,
    rewritten_pages,
    runs_in_prefill,
    tail_stays,
)
from kvir.lowering.quota import Run, first_run, kept_rows, rows_that_stay
from kvir.lowering.spans import Bounds, ceil_div, most_pages, pages_since, span_pages, span_peak_pages
from kvir.lowering.stages import CompactClass, LayoutPlan, Selection, ShareAmount
from kvir.policy_ir.nodes import MAX_TOKENS
from kvir.policy_ir.rules import Every, Over, PrefillChunk, PrefillEnd, Trigger

NEVER = 1 << 62


def most_left(layout: LayoutPlan, c: CompactClass) -> int:
    """The most pages that selections leave to the units of a class when a prompt fills the model's
    context."""
    context = layout.budgeted.bound.model.context_tokens
    course = Course(layout, c, context)
    if c.decode.selection is None:
        return course.resident(context).most
    return course.settled(c.decode.selection, context)


def most_compact_pages(layout: LayoutPlan, c: CompactClass) -> int:
    """The longest list of compact pages that one unit of a class ever has."""
    context = layout.budgeted.bound.model.context_tokens
    selections = (c.prefill.selection, c.decode.selection)
    kept = (kept_rows(first_run(s, context, context)).most for s in selections if s is not None)
    return max(ceil_div(rows, layout.page_tokens) for rows in kept)


@dataclass(frozen=True)
class Course:
    """What all units of one class hold together in the course of one request."""

    layout: LayoutPlan
    units: CompactClass
    prompt: int

    def resident(self, n: int) -> Bounds:
        """Between two steps of decode, at length n >= prompt."""
        fold, generated = self.units.decode.selection, n - self.prompt
        first, last = self.first_fold
        if fold is None or generated < first:
            return self._grown(n)
        folded = self._folded(fold, n)
        if generated >= last:
            return folded
        grown = self._grown(n)
        return Bounds(min(folded.least, grown.least), max(folded.most, grown.most))

    def peak(self, n: int, chunk_tokens: int) -> int:
        """The most on the way to length n, reservations included."""
        return max(self._prefill_peak(chunk_tokens), self.growth_peak(n))

    def growth_peak(self, n: int) -> int:
        """The most from the end of the prompt to length n, reservations included."""
        fold = self.units.decode.selection
        first, last = self.first_fold
        at_fold = min(n, self.prompt + last)
        peak = self._grown(at_fold).most
        if fold is None or n - self.prompt < first:
            return peak
        run = self._run(fold, n, self._counted(n))
        if self._prompt_run is None:
            at_first = (
                self._grown(at_fold).most + compact_pages(self.layout, self.units.units, run, NO_ROWS).most
            )
        else:
            dense = self._count * pages_since(self.prompt, at_fold, self._size)
            at_first = dense + rewritten_pages(self.layout, self.units.units, self._prompt_run, run)
        since = min(self._since_fold(fold, n) + 1, n - self.prompt - first)
        again = self._count * most_pages(since, self._size)
        again += rewritten_pages(self.layout, self.units.units, run, run)
        return max(peak, at_first, again if since else 0)

    def settled(self, fold: Selection, n: int) -> int:
        """The most between two steps once selections of decode run, up to length n."""
        grown = self._count * most_pages(self._since_fold(fold, n), self._size)
        return self._fold_pages(fold, n, self._counted(n), NO_ROWS).most + grown

    # ---- prefill -------------------------------------------------------------------------------------------

    @property
    def _size(self) -> int:
        return self.layout.page_tokens

    @property
    def _count(self) -> int:
        return len(self.units.units)

    @cached_property
    def _prompt_run(self) -> Run | None:
        """The last selection of the prompt; None if it stays dense."""
        selection = self.units.prefill.selection
        if selection is None or not runs_in_prefill(selection, self.prompt):
            return None
        chunked = any(isinstance(t, PrefillChunk) for t in selection.triggers)
        return replace(first_run(selection, self.prompt, self.prompt), again=chunked)

    @cached_property
    def _prompt_pages(self) -> Bounds:
        """Compact pages when the prompt ends."""
        if self._prompt_run is None:
            return Bounds(0, 0)
        tail = self.prompt % self._size if tail_stays(self._prompt_run.selection, self._size) else 0
        return compact_pages(self.layout, self.units.units, self._prompt_run, Bounds(tail, tail))

    @cached_property
    def _prompt_rows(self) -> Bounds:
        """Rows of one unit when the prompt ends."""
        if self._prompt_run is not None:
            return kept_rows(self._prompt_run)
        sink, recent = self._prompt_window
        rows = min(self.prompt, sink + recent)
        return Bounds(rows, rows)

    @property
    def _prompt_window(self) -> tuple[int, int]:
        """(sinks, last rows) of the prompt that are sure to be there when decode begins."""
        if self._prompt_run is not None:
            return self._prompt_run.selection.sink_tokens, self._prompt_run.selection.recent_tokens
        kept = self.units.prefill
        # what the first query of decode would see
        return kept.sink_tokens, self.prompt if kept.recent_tokens is None else kept.recent_tokens - 1

    def _prefill_peak(self, chunk_tokens: int) -> int:
        dense = self._count * span_peak_pages(self.units.prefill_span, self._size, self.prompt)
        run = self._prompt_run
        if run is None:
            return dense
        block, first = block_tokens(run.selection.triggers), None
        if any(isinstance(t, PrefillChunk) for t in run.selection.triggers):
            first = first_drop(run.selection, self.prompt, block or chunk_tokens)
        if first is None:
            return dense + self._prompt_pages.most
        if block is None:  # the server's chunks: one lies in dense pages
            pages = self._pages_of(min(chunk_tokens, self.prompt), chunk_tokens)
        else:
            # dense are tokens that no whole block has ended, before a chunk of the server and at its end;
            # before the first selection that drops rows, all (what it decides on goes to the copy at once)
            before = max(ceil_div(first - 1, self._size), self._pages_of(block - 1, block))
            pages = before + self._pages_of(min(block - 1, chunk_tokens), block)
        return min(dense, self._count * pages) + rewritten_pages(self.layout, self.units.units, run, run)

    def _pages_of(self, tokens: int, every: int) -> int:
        """The most pages of so many tokens that begin at a multiple of `every`."""
        return most_pages(tokens, self._size) if every % self._size else ceil_div(tokens, self._size)

    # ---- decode --------------------------------------------------------------------------------------------

    def _grown(self, n: int) -> Bounds:
        """Pages at length n if no selection has run since the prompt ended."""
        size, count, window = self._size, self._count, self.units.decode_span.window_pages
        if self._prompt_run is None:
            if self.units.decode.selection is None:
                pages = count * span_pages(self.units.decode_span, size, n)
            else:  # nothing slides until the first selection
                held = span_pages(self.units.prefill_span, size, self.prompt)
                pages = count * (held + ceil_div(n, size) - ceil_div(self.prompt, size))
            return Bounds(pages, pages)
        dense = pages_since(self.prompt, n, size)
        if window is not None:  # it slides over dense and compact rows
            dense = min(dense, ceil_div(n, size) - (n // size - window))
            return Bounds(count * dense, self._prompt_pages.most + count * dense)
        return Bounds(self._prompt_pages.least + count * dense, self._prompt_pages.most + count * dense)

    def _run(self, fold: Selection, n: int, counted: int) -> Run:
        """A selection of decode at length n.  Every row that came up to length `counted` was there to choose
        from, or a selection dropped it for others."""
        rows, (sink, recent) = self._prompt_rows, self._prompt_window
        held = Bounds(rows.least + counted - self.prompt, rows.most + n - self.prompt)
        least = rows_that_stay(fold, n, self.prompt, sink, self.prompt - recent)
        most = least if self._prompt_run is None else rows_that_stay(fold, n, self.prompt, n, n)
        stays = Bounds(min(least, held.least), min(most, held.most))
        fewest = max(0, rows.least - stays.most)
        return Run(fold, n, self.prompt, held, stays, again=True, widened=self._widens(fold), fewest=fewest)

    def _widens(self, fold: Selection) -> bool:
        """Whether rows that stay grow in number while tokens are generated, and not by scores."""
        sink, recent = self._prompt_window
        narrower = sink < fold.sink_tokens or recent < fold.recent_tokens
        return fold.region == "prompt" or (recent < self.prompt and narrower)

    def _tail(self, fold: Selection, n: int) -> Bounds:
        """Rows of the partial last page that stay where they are when a selection of decode runs."""
        if not tail_stays(fold, self._size):
            return NO_ROWS
        start, (sink, recent) = n - n % self._size, self._prompt_window
        of_prompt = max(0, self.prompt - start)
        kept = min(of_prompt, max(0, min(sink, self.prompt) - start) + min(of_prompt, recent))
        least = n - max(start, self.prompt) + kept
        return Bounds(least, least if self._prompt_run is None else n - start)

    def _counted(self, n: int) -> int:
        """The length of the first selection of decode: up to there, every row that came is there."""
        return min(n, self.prompt + self.first_fold[0])

    def _fold_pages(self, fold: Selection, n: int, counted: int, tail: Bounds) -> Bounds:
        return compact_pages(self.layout, self.units.units, self._run(fold, n, counted), tail)

    @cached_property
    def first_fold(self) -> tuple[int, int]:
        """Generated tokens after which the first selection of decode runs: at the earliest, at the latest."""
        fold = self.units.decode.selection
        firsts = [] if fold is None else [self._first(fold, trigger) for trigger in fold.triggers]
        return min((a for a, _ in firsts), default=NEVER), min((b for _, b in firsts), default=NEVER)

    def _first(self, fold: Selection, trigger: Trigger) -> tuple[int, int]:
        rows = self._prompt_rows
        match trigger:
            case Every(tokens=tokens):
                first = last = step = tokens
            case Over(tokens=tokens):
                first, last, step = max(1, tokens + 1 - rows.most), max(1, tokens + 1 - rows.least), 1
            case PrefillChunk() | PrefillEnd():
                return NEVER, NEVER
            case _:
                assert_never(trigger)
        if isinstance(trigger, Over) and self._spread(fold):
            first = 1  # a rival in another class may hold more
        if self._prompt_run is not None:
            return first, last
        if self._widens(fold) and any(isinstance(q.amount, ShareAmount) for q in fold.quotas):
            # a row can go early on, but not later: the budget grows, and the rows that may go do not
            return first, NEVER
        # the first of first, first + step, ... at which some row can go; from then on one always can
        low, high = 0, MAX_TOKENS // step
        while low < high:
            middle = (low + high) // 2
            if self._can_go(fold, self.prompt + first + middle * step):
                high = middle
            else:
                low = middle + 1
        found = first + low * step if low < MAX_TOKENS // step else NEVER
        # rivals in other classes may have begun to select before
        return first if self._spread(fold) else found, found

    def _spread(self, fold: Selection) -> bool:
        """Whether some group of rivals has units in other classes."""
        groups = (q.group * group_count(self.layout, q, self.units.units) for q in fold.quotas)
        return any(units != self._count for units in groups)

    def _can_go(self, fold: Selection, n: int) -> bool:
        """Whether some row can go at length n of a unit that is dense until then."""
        run = self._run(fold, n, n)
        return kept_rows(replace(run, again=False, widened=False)).least < run.held.most

    def _since_fold(self, fold: Selection, n: int) -> int:
        """The most tokens that come between a selection of decode and the step before the next one."""
        counted = self._counted(n)
        kept = min(kept_rows(self._run(fold, length, counted)).least for length in (counted, n))
        since = NEVER
        for trigger in fold.triggers:
            if isinstance(trigger, Every):
                since = min(since, trigger.tokens - 1)
            elif isinstance(trigger, Over):
                since = min(since, max(0, trigger.tokens - kept))
        return since

    def _folded(self, fold: Selection, n: int) -> Bounds:
        """Pages at length n if a selection of decode has run."""
        size, count = self._size, self._count
        match fold.triggers:
            case (Every(tokens=tokens),):
                at = n - (n - self.prompt) % tokens
                kept = self._fold_pages(fold, at, at, self._tail(fold, at))
                dense = count * pages_since(at, n, size)
                return Bounds(kept.least + dense, kept.most + dense)
            case _:
                since = min(self._since_fold(fold, n), n - self.prompt)
                least = self._fold_pages(fold, n - since, self._counted(n - since), Bounds(0, size - 1)).least
                dense = count * min(most_pages(since, size), ceil_div(n, size))
                most = self._fold_pages(fold, n, self._counted(n), NO_ROWS).most
                return Bounds(least + count * pages_since(n, n, size), most + dense)
