"""Selections of decode that run on the device: the host says before a step who selects, and reads after it
what stayed.  Between the two a step is launches alone, so a graph may replay it.

Which selections go this way `lowering/triggers.py` says; others are carried out by `selecting.py`, layer by
layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kvir.kernels.ref.select_offer import candidate_rows
from kvir.kernels.triton.decoder import Decoder
from kvir.kernels.triton.trigger import Due, Nuclei, Trigger
from kvir.lowering.triggers import DeviceSelections, Nucleus
from kvir.sglang_ext.compact import Compact
from kvir.sglang_ext.forwards import Work
from kvir.sglang_ext.pool import KvirPool

NONE = Nucleus(rule=-1, window=0, mass=0.0, floor=0, cap=0, candidates=0)


class DeviceTriggers:
    """Of one server, without other ranks."""

    def __init__(
        self, selections: DeviceSelections, pool: KvirPool, decoder: Decoder, ring_rows: int
    ) -> None:
        self._pool = pool
        self._rules = {unit: pool.plan.policy.rules[x.rule] for unit, x in selections.nuclei.items()}
        self._trigger = Trigger(
            decoder,
            nuclei_of(selections, pool.plan.layout.unit_count),
            ring_rows=ring_rows,
            candidates=selections.candidates,
            dtype=pool.kv.dtype,
        )
        self.remember, self.select = self._trigger.remember, self._trigger.select
        self._due: dict[int, tuple[Work, Due]] = {}  # by place in the batch
        self._tail = torch.empty(0, dtype=torch.int64)  # of a prefill: the last queries of each request ...
        self._tail_rows = self._tail_ends = self._tail  # ... its row, and the tokens up to and with them

    def begin_extend(self, rows: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Before a prefill: requests with `starts` tokens get `counts` more; rows int64 [B], of the ring."""
        tails, ends, begin = list[int](), list[int](), 0
        for start, count in zip(starts, counts, strict=True):
            first = max(0, count - self._trigger.window)
            tails += range(begin + first, begin + count)
            ends += range(start + first + 1, start + count + 1)
            begin += count
        kept = torch.tensor([min(count, self._trigger.window) for count in counts], device=rows.device)
        self._tail, self._tail_ends = (torch.tensor(x, device=rows.device) for x in (tails, ends))
        self._tail_rows = rows.repeat_interleave(kept)

    def remember_chunk(self, layer: int, q: torch.Tensor) -> None:
        """The last queries of each request of a prefill, which decode may look back at; q [T, Hq, D]."""
        if len(self._tail):
            self.remember(layer, q[self._tail], self._tail_rows, self._tail_ends)

    def place(self, works: list[Work]) -> None:
        """Before a step: those of its requests that select in it."""
        self._due = {i: (w, self._due_of(w, w.compact)) for i, w in enumerate(works) if w.compact is not None}
        self._trigger.place([self._due[i][1] if i in self._due else None for i in range(len(works))])

    def settle(self) -> None:
        """After a step: the books learn what stayed.  Waits for the device if anything was selected."""
        due, self._due = self._due, {}
        if not due:
            return
        for i, found in self._trigger.chosen().items():
            work, asked = due[i]
            compact = work.compact
            assert compact is not None
            assert compact.chosen is not None
            for unit in np.nonzero(compact.chosen.moves)[0].tolist():
                stays = found.kept[unit].numpy(), asked.candidates[unit].tolist()
                self._settle(work, compact, unit, *stays, int(found.counts[unit]))
            self._pool.residency.compacts.publish(compact)

    # ---- parts ---------------------------------------------------------------------------------------------

    def _due_of(self, work: Work, compact: Compact) -> Due:
        chosen = compact.chosen
        assert chosen is not None
        units = len(chosen.moves)
        runs, dest = np.zeros((units, 2), np.int32), np.full((units, len(compact.spare_rows)), -1, np.int32)
        for unit in np.nonzero(chosen.moves)[0].tolist():
            rule = self._rules[unit]
            ends = candidate_rows(rule.keep, rule.region, work.tokens, work.state.prompt_tokens)
            runs[unit] = np.searchsorted(compact.held_positions(unit, work.tokens), ends)
            pages = compact.allot(unit)
            dest[unit, : len(pages)] = pages
        return Due(
            moves=torch.from_numpy(chosen.moves),
            candidates=torch.from_numpy(runs),
            left=torch.from_numpy(chosen.left.astype(np.int32)),
            placed=torch.from_numpy(np.where(compact.moved, compact.copied, 0).astype(np.int32)),
            dest=torch.from_numpy(dest),
        )

    def _settle(
        self, work: Work, compact: Compact, unit: int, flags: np.ndarray, run: Sequence[int], count: int
    ) -> None:
        held = compact.held_positions(unit, work.tokens)
        start, stop = run
        stays = np.ones(len(held), bool)
        stays[start:stop] = flags[: stop - start]
        assert compact.chosen is not None
        moved = held[stays & (held < compact.chosen.at[unit] - compact.chosen.left[unit])]
        if len(moved) != count:
            raise RuntimeError(
                f"kvir: unit {unit} has {count} rows on the device and {len(moved)} in the books"
            )
        compact.place(unit, moved)


def nuclei_of(selections: DeviceSelections, units: int) -> Nuclei:
    """How all units select; those that do not observe no query."""
    each = [selections.nuclei.get(unit, NONE) for unit in range(units)]
    return Nuclei(
        windows=torch.tensor([x.window for x in each], dtype=torch.int32),
        masses=torch.tensor([x.mass for x in each], dtype=torch.float64),
        floors=torch.tensor([x.floor for x in each], dtype=torch.int32),
        caps=torch.tensor([x.cap for x in each], dtype=torch.int32),
    )
