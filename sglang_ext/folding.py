"""When a request's rows are selected, and to how many: what the plan says of units that keep rows by score.

Counts only, on the host, before the forward; which rows they are, the scores decide in it (`selecting.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

import numpy as np
from numpy.typing import NDArray

from kvir.lowering.compact import (
    NO_ROWS,
    block_tokens,
    compact_pages,
    first_drop,
    runs_in_prefill,
    tail_stays,
)
from kvir.lowering.quota import Run, first_run, kept_rows, rows_that_stay, undecided
from kvir.lowering.spans import Bounds
from kvir.lowering.stages import CompactClass, LayoutPlan, Selection
from kvir.policy_ir.rules import Every, Over, PrefillChunk, PrefillEnd
from kvir.sglang_ext.geometry import IntArray
from kvir.sglang_ext.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from kvir.sglang_ext.requests import RequestState

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True)
class Chosen:
    """How many rows one selection leaves."""

    moves: BoolArray  # [U] the unit selects now
    exact: BoolArray  # [U] it gets `most` rows, whatever the scores are
    most: IntArray  # [U] rows that go to compact head-pages, at most
    left: IntArray  # [U] last rows that stay where they are, in the partial page
    at: IntArray  # [U] length at which it selects
    stock: IntArray  # [lanes] head-pages for units that are not exact
    passes: BoolArray  # [U] rows of this chunk that come before `at` go from it to the copy, by no dense page


class Selections:
    """The selections of a plan: at the end of a prompt, and after tokens that were generated."""

    def __init__(self, layout: LayoutPlan, ranks: Ranks = ALONE) -> None:
        self._layout = layout
        self._lane_of_unit: IntArray = ranks.lane_of_unit(layout)
        self._lanes = ranks.lane_count(layout)
        self._prefill = [(c, c.prefill.selection) for c in layout.compact if c.prefill.selection is not None]
        # by rule: classes that select together
        self._decode: dict[int, list[tuple[CompactClass, Selection, IntArray]]] = {}
        for c in layout.compact:
            if (selection := c.decode.selection) is not None:
                entry = (c, selection, np.asarray(c.units, np.int64))
                self._decode.setdefault(selection.rule, []).append(entry)

    def runs(self, prompt_tokens: int) -> bool:
        """Whether a prompt of that length is compacted."""
        return any(runs_in_prefill(selection, prompt_tokens) for _, selection in self._prefill)

    def publishes(self, prompt_tokens: int) -> int:
        """Tokens of a prompt that the prefix tree may hold: the blocks before the first of which a selection
        drops rows.

        The rows of that block depend on no selection either; but they, dense for the tree, and the copy of
        what is left of them would be in memory together.
        """
        return min((n - block for n, block in self._drops_first(prompt_tokens)), default=prompt_tokens)

    def first_drop(self, prompt_tokens: int) -> int:
        """The least n so that rows are dropped after the first n tokens of a prompt, with more of it to come;
        `prompt_tokens` if there is none.
        """
        return min((n for n, _ in self._drops_first(prompt_tokens)), default=prompt_tokens)

    def _drops_first(self, prompt_tokens: int) -> Iterator[tuple[int, int]]:
        """(n, tokens of its blocks) of each rule that drops rows before the end of a prompt."""
        for _, selection in self._prefill:
            block = block_tokens(selection.triggers)
            first = first_drop(selection, prompt_tokens, block)
            if first is not None and block is not None:
                yield first, block

    def in_prefill(self, state: RequestState, end: int) -> Chosen | None:
        """What is selected when a prompt has been read up to `end`; None: nothing."""
        if not state.selects:
            return None
        draft, prompt = self._draft(), state.prompt_tokens
        for c, selection in self._prefill:
            units, block = np.asarray(c.units, np.int64), block_tokens(selection.triggers)
            if block is not None:
                if runs_in_prefill(selection, prompt):
                    at = end if end == prompt else end // block * block
                    self._add_block(draft, selection, state, units, at)
            elif end == prompt and _ends(selection, prompt):
                # a unit whose budget is the whole prompt moves too: units of one class keep the same pages
                run = first_run(selection, prompt, prompt)
                rows, tail = kept_rows(run), self._tail(selection, prompt)
                draft.add(units, np.full(len(units), rows.most), rows.exact, tail, prompt)
                if not rows.exact:
                    draft.stock_up(self._stock(c, selection, run, tail))
        return draft.chosen()

    def _add_block(
        self, draft: _Draft, selection: Selection, state: RequestState, units: IntArray, at: int
    ) -> None:
        """Selections after whole blocks: the last one up to `at`, with the rows that those before it left."""
        compact, block, prompt = state.compact, block_tokens(selection.triggers), state.prompt_tokens
        assert block is not None
        moved = compact is not None and bool(compact.moved[units[0]])
        last = int(compact.tokens[units[0]]) if compact is not None and moved else 0
        held = int(compact.rows(last)[units[0]]) if compact is not None and moved else 0
        if at <= last:
            return
        for n in (*range(last - last % block + block, at, block), at):
            held += n - last
            last = n
            stays = rows_that_stay(selection, n, prompt, n, n)
            run = Run(selection, n, prompt, Bounds(held, held), Bounds(stays, stays), again=moved)
            rows = kept_rows(run)
            moved |= rows.most < held
            held = rows.most
        if moved:
            tail = self._tail(selection, at)
            draft.add(units, np.full(len(units), held), True, tail, at, passes=True)

    def while_decoding(self, state: RequestState, tokens: int) -> Chosen | None:
        """What is selected when the request has `tokens` tokens, the one of this step included."""
        if not self._decode:
            return None
        draft = self._draft()
        for members in self._decode.values():
            held = [_held(state, units, tokens) for _, _, units in members]
            selection = members[0][1]
            if not self._fires(selection, state, max(int(h.max()) for h in held), tokens):
                continue
            runs = [
                self._runs(own, state, units, rows, tokens)
                for (_, own, units), rows in zip(members, held, strict=True)
            ]
            moved = any(state.compact is not None and state.compact.moved[u].any() for _, _, u in members)
            if not moved and all(kept_rows(run).least >= run.held.most for each in runs for run in each):
                continue  # every row is sure to stay
            for (_, own, units), each in zip(members, runs, strict=True):
                self._add(draft, own, state, units, each, tokens)
        return draft.chosen()

    # ---- parts ---------------------------------------------------------------------------------------------

    def _draft(self) -> _Draft:
        return _Draft(self._layout.unit_count, self._lanes)

    def _runs(
        self, selection: Selection, state: RequestState, units: IntArray, held: IntArray, tokens: int
    ) -> list[Run]:
        """The selection of decode as each unit sees it."""
        compact, runs = state.compact, list[Run]()
        for unit, count in zip(units.tolist(), held.tolist(), strict=True):
            folded = compact is not None and bool(compact.moved[unit])
            stays = _staying(selection, state, unit, tokens) if folded else None
            runs.append(_run(selection, state, tokens, count, stays))
        return runs

    def _add(
        self,
        draft: _Draft,
        selection: Selection,
        state: RequestState,
        units: IntArray,
        runs: Sequence[Run],
        tokens: int,
    ) -> None:
        bounds = [kept_rows(run) for run in runs]
        tail, exact = self._tail(selection, tokens), all(b.exact for b in bounds)
        most = np.array([b.most for b in bounds], np.int64)
        draft.add(units, most, exact, tail, tokens)
        if not exact:
            had = 0 if state.compact is None else state.compact.pages[units]
            pages = -(-np.maximum(most - tail, 0) // self._layout.page_tokens)
            draft.stock_up(self._shares(runs, units, np.maximum(pages - had, 0)))

    def _tail(self, selection: Selection, tokens: int) -> int:
        size = self._layout.page_tokens
        return tokens % size if tail_stays(selection, size) else 0

    def _stock(self, c: CompactClass, selection: Selection, run: Run, tail: int) -> Iterator[tuple[int, int]]:
        """(lane, head-pages) that rivals take at most."""

        def most(units: Sequence[int]) -> int:
            return compact_pages(self._layout, units, run, Bounds(tail, tail)).most

        if any(quota.scope == "model" for quota in selection.quotas):
            yield self._lanes - 1, most(c.units)  # rivals are of one rank, and any layer
            return
        units = np.asarray(c.units)
        lanes = self._lane_of_unit[units]
        for lane in np.unique(lanes).tolist():
            yield lane, most(units[lanes == lane].tolist())

    def _shares(self, runs: Sequence[Run], units: IntArray, extra: IntArray) -> Iterator[tuple[int, int]]:
        """The same for units that have head-pages already: what they may need beside those."""
        lanes = self._lane_of_unit[units]
        for lane in np.unique(lanes).tolist():
            here = np.nonzero(lanes == lane)[0]
            largest = max((runs[i] for i in here), key=lambda run: run.held.most)
            together = compact_pages(self._layout, units[here].tolist(), largest, NO_ROWS).most
            yield lane, min(int(extra[here].sum()), together)

    def _fires(self, selection: Selection, state: RequestState, held: int, tokens: int) -> bool:
        generated = tokens - state.prompt_tokens
        for trigger in selection.triggers:
            match trigger:
                case Every(tokens=every):
                    if generated % every == 0:
                        return True
                case Over(tokens=most):
                    if held > most:
                        return True
                case PrefillChunk() | PrefillEnd():
                    continue
                case _:
                    assert_never(trigger)
        return False


class _Draft:
    """A `Chosen` while classes are added to it."""

    def __init__(self, count: int, lanes: int) -> None:
        self._moves, self._exact = np.zeros(count, bool), np.ones(count, bool)
        self._most, self._left = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self._at, self._passes = np.zeros(count, np.int64), np.zeros(count, bool)
        self._pages = np.zeros(lanes, np.int64)

    def add(
        self, units: IntArray, most: IntArray, exact: bool, tail: int, at: int, *, passes: bool = False
    ) -> None:
        self._passes[units] = passes
        self._moves[units], self._exact[units], self._at[units] = True, exact, at
        self._left[units], self._most[units] = tail, most - tail

    def stock_up(self, pages: Iterator[tuple[int, int]]) -> None:
        for lane, count in pages:
            self._pages[lane] += count

    def chosen(self) -> Chosen | None:
        if not self._moves.any():
            return None
        return Chosen(
            moves=self._moves,
            exact=self._exact,
            most=self._most,
            left=self._left,
            at=self._at,
            stock=self._pages,
            passes=self._passes,
        )


def _ends(selection: Selection, prompt: int) -> bool:
    return any(isinstance(t, PrefillEnd) and prompt > t.over for t in selection.triggers)


def _held(state: RequestState, units: IntArray, tokens: int) -> IntArray:
    """Rows that units hold at length `tokens`."""
    if state.compact is None:
        return np.full(len(units), tokens)
    return np.where(state.compact.moved[units], state.compact.rows(tokens)[units], tokens)


def _staying(selection: Selection, state: RequestState, unit: int, tokens: int) -> int:
    """Rows of a unit that has selected before, and that stay now whatever their scores are."""
    compact = state.compact
    assert compact is not None
    positions = compact.positions[unit]
    start, stop = undecided(selection, tokens, state.prompt_tokens)
    inside = int(np.searchsorted(positions, stop) - np.searchsorted(positions, start))
    dense = int(compact.tokens[unit] - compact.left[unit])
    inside += max(0, min(stop, tokens) - max(start, dense))
    return int(compact.rows(tokens)[unit]) - inside


def _run(selection: Selection, state: RequestState, tokens: int, held: int, stays: int | None) -> Run:
    prompt = state.prompt_tokens
    if stays is None:
        stays = rows_that_stay(selection, tokens, prompt, tokens, tokens)
    fixed, rows = Bounds(stays, stays), Bounds(held, held)
    return Run(selection, tokens, prompt, held=rows, stays=fixed, again=state.compact is not None)
