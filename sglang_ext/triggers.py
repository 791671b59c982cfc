"""Selections of decode that run on the device: the host says before a step who selects, and reads after it
what stayed.  Between the two a step is launches alone, so a graph may replay it.

Which selections go this way `lowering/triggers.py` says; others are carried out by `selecting.py`, layer by
layer.
"""

from __future__ import annotations

import numpy as np
import torch

from kvir.kernels.ref.select_offer import candidate_rows
from kvir.kernels.triton.decoder import Decoder
from kvir.kernels.triton.trigger import Due, Nuclei, Trigger
from kvir.lowering.triggers import DeviceSelections, Nucleus
from kvir.sglang_ext.compact import Compact
from kvir.sglang_ext.forwards import Work
from kvir.sglang_ext.geometry import IntArray
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
        self.window = selections.window
        self.remember, self.select = self._trigger.remember, self._trigger.select
        self._works: dict[int, Work] = {}

    def place(self, works: list[Work]) -> None:
        """Before a step: those of its requests that select in it."""
        self._works = {i: work for i, work in enumerate(works) if work.compact is not None}
        self._trigger.place([None if w.compact is None else self._due(w, w.compact) for w in works])

    def settle(self) -> None:
        """After a step: the books learn what stayed.  Waits for the device if anything was selected."""
        works, self._works = self._works, {}
        if not works:
            return
        for i, found in self._trigger.chosen().items():
            work = works[i]
            compact = work.compact
            assert compact is not None
            assert compact.chosen is not None
            for unit in np.nonzero(compact.chosen.moves)[0].tolist():
                self._settle(work, compact, unit, found.kept[unit].numpy(), int(found.counts[unit]))
            self._pool.residency.compacts.publish(compact)

    # ---- parts ---------------------------------------------------------------------------------------------

    def _due(self, work: Work, compact: Compact) -> Due:
        chosen = compact.chosen
        assert chosen is not None
        units = len(chosen.moves)
        runs, dest = np.zeros((units, 2), np.int32), np.full((units, len(compact.spare_rows)), -1, np.int32)
        for unit in np.nonzero(chosen.moves)[0].tolist():
            runs[unit] = self._run(work, compact.held_positions(unit, work.tokens), unit)
            pages = compact.allot(unit)
            dest[unit, : len(pages)] = pages
        return Due(
            moves=torch.from_numpy(chosen.moves),
            candidates=torch.from_numpy(runs),
            left=torch.from_numpy(chosen.left.astype(np.int32)),
            placed=torch.from_numpy(np.where(compact.moved, compact.copied, 0).astype(np.int32)),
            dest=torch.from_numpy(dest),
        )

    def _run(self, work: Work, held: IntArray, unit: int) -> IntArray:
        """Candidates [start, stop) among the rows of a unit."""
        rule = self._rules[unit]
        ends = candidate_rows(rule.keep, rule.region, work.tokens, work.state.prompt_tokens)
        return np.searchsorted(held, ends)

    def _settle(self, work: Work, compact: Compact, unit: int, flags: np.ndarray, count: int) -> None:
        held = compact.held_positions(unit, work.tokens)
        start, stop = self._run(work, held, unit).tolist()
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
