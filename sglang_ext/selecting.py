"""Which rows stay: score, select and copy, inside the forward of a prompt's last chunk or of a decode step.

The scheduler has reserved the compact head-pages already.  Each layer scores its rows after its attention,
while the last queries are at hand.  A unit whose rivals are all in its layer is copied there and then; where
layers compete, each leaves its scores, and the last of them selects and copies for all, from the dense pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvir.kernels.ref.compact import compact as copy_rows
from kvir.kernels.ref.select_offer import LayerState, Offer, Unit, offer
from kvir.kernels.ref.select_rule import choose
from kvir.kernels.score_ops import ScoreInputs
from kvir.lowering.stages import ExecutionPlan
from kvir.policy_ir.nodes import Phase
from kvir.sglang_ext.compact import Compact
from kvir.sglang_ext.geometry import IntArray
from kvir.sglang_ext.held_rows import HeldRows, RowReader
from kvir.sglang_ext.model_parts import ModelParts, needed
from kvir.sglang_ext.observing import LayerMemory, Wants
from kvir.sglang_ext.pool import KvirPool
from kvir.sglang_ext.requests import RequestState
from kvir.sglang_ext.selecting_rules import Selecting, rule_scores, selecting_rules

if TYPE_CHECKING:
    from kvir.sglang_ext.allocator import KvirAllocator


@dataclass
class Work:
    """One request of a forward: its rows in the batch, and what it selects after this step."""

    state: RequestState
    begin: int  # rows [begin, end) of the batch
    end: int
    start: int  # tokens before this step
    pages: IntArray  # logical pages of all its tokens
    compact: Compact | None  # None: nothing is selected now
    phase: Phase
    offers: dict[int, list[Offer]] = field(default_factory=dict[int, list[Offer]])  # by rule

    @property
    def tokens(self) -> int:
        return self.start + self.end - self.begin


@dataclass(frozen=True)
class LayerCall:
    """One layer of a forward, as the attention backend computes it."""

    index: int  # among the layers with a KV cache
    layer_id: int  # SGLang's
    q: torch.Tensor  # [T, Hq, D]
    k: torch.Tensor  # [T, Hkv, D]
    v: torch.Tensor
    scale: float
    logit_cap: float


class RowSelection:
    """What a plan selects, and what that takes to remember."""

    def __init__(self, plan: ExecutionPlan, pool: KvirPool, model: torch.nn.Module) -> None:
        self._pool = pool
        self._rows = RowReader(pool, plan.layout.kv_heads)
        self._kv_heads = plan.layout.kv_heads
        self._rules: dict[Phase, dict[int, Selecting]] = {
            "prefill": selecting_rules(plan, "prefill"),
            "decode": selecting_rules(plan, "decode"),
        }
        self._wants: dict[int, Wants] = {}
        every = [each for rules in self._rules.values() for each in rules.values()]
        for layer in sorted({layer for each in every for layer in each.governed}):
            rules = [each.rule for each in every if layer in each.governed]
            self._wants[layer] = Wants.of(s for rule in rules for s in rule_scores(rule))
        self._decoding = {layer for each in self._rules["decode"].values() for layer in each.governed}
        layer_ids = [layer.layer_id for layer in plan.model.layers]
        self._parts: ModelParts = needed(model, {layer_ids[i]: w.needs for i, w in self._wants.items()})

    # ---- once per forward ----------------------------------------------------------------------------------

    def of_extend(self, allocator: KvirAllocator, starts: list[int], lens: list[int]) -> list[Work]:
        """The requests of the extend that is launched now, in batch order."""
        states = [state for state, _, _ in allocator.extending]
        return self._work(states, allocator.compacting, starts, lens, "prefill")

    def of_decode(self, allocator: KvirAllocator, lens: list[int]) -> list[Work]:
        """The same of a decode step; lens count the step's own token."""
        if not self._decoding:
            return []
        starts = [length - 1 for length in lens]
        return self._work(allocator.decoding, allocator.compacting, starts, [1] * len(lens), "decode")

    def _work(
        self,
        states: list[RequestState],
        compacts: list[Compact | None],
        starts: list[int],
        lens: list[int],
        phase: Phase,
    ) -> list[Work]:
        found: list[Work] = []
        begin = 0
        for state, compact, start, length in zip(states, compacts, starts, lens, strict=True):
            pages = np.array(state.pages, np.int64)
            found.append(Work(state, begin, begin + length, start, pages, compact, phase))
            begin += length
        return found

    # ---- once per layer ------------------------------------------------------------------------------------

    def observe(self, works: list[Work], call: LayerCall) -> None:
        """After a layer's attention: keep what scores need; where something is selected, score and copy."""
        wants = self._wants.get(call.index)
        if wants is None:
            return
        for work in works:
            if work.phase == "decode":
                if call.index in self._decoding:
                    self._observe_step(work, call)
            elif work.state.selects or call.index in self._decoding:
                self._observe_chunk(work, call, wants)

    def after_append(self, works: list[Work], layer: int) -> None:
        """Every row of this layer is in its dense pages: rules that end here and span layers are decided."""
        for work in works:
            if work.compact is None:
                continue
            for number, offers in list(work.offers.items()):
                each = self._rules[work.phase][number]
                if each.last_layer != layer:
                    continue
                del work.offers[number]
                for unit, rows in choose(each.rule, offers, each.governed, work.tokens).items():
                    self._copy(work, unit, rows, self._rows.dense(unit, work.pages, work.tokens))
            if layer == max(self._wants):
                self._pool.residency.compacts.publish(work.compact, work.tokens)

    # ---- parts ---------------------------------------------------------------------------------------------

    def _observe_chunk(self, work: Work, call: LayerCall, wants: Wants) -> None:
        memory = self._memory(work, call, wants)
        span = slice(work.begin, work.end)
        memory.remember(call.q[span])
        if not work.state.selects:
            return
        held = None
        if wants.running or work.compact is not None:
            held = self._rows.prompt(call.index, work.pages, work.start, call.k[span], call.v[span])
        memory.add_up(call.q[span], None if held is None else held.k, work.start)
        if work.compact is None:
            return
        assert held is not None
        self._select(work, call, memory, {head: held.of(head) for head in range(self._kv_heads)}, held)
        memory.forget_sums()
        if call.index not in self._decoding:
            del work.state.memory[call.index]

    def _observe_step(self, work: Work, call: LayerCall) -> None:
        memory = self._memory(work, call, self._wants[call.index])
        memory.remember(call.q[work.begin : work.end])
        chosen = None if work.compact is None else work.compact.chosen
        if work.compact is None or chosen is None:
            return
        unit0 = call.index * self._kv_heads
        heads = [h for h in range(self._kv_heads) if chosen.moves[unit0 + h]]
        if not heads:
            return
        if any(work.compact.moved[unit0 + h] for h in heads):
            rows = {h: self._rows.unit((call.index, h), work.pages, work.tokens, work.compact) for h in heads}
            self._select(work, call, memory, rows, None)
            return
        held = self._rows.layer(call.index, work.pages, work.tokens)
        self._select(work, call, memory, {head: held.of(head) for head in heads}, held)

    def _memory(self, work: Work, call: LayerCall, wants: Wants) -> LayerMemory:
        memory = work.state.memory.get(call.index)
        if memory is None:
            rope = self._parts.rope(call.layer_id) if "rope" in wants.needs else None
            memory = LayerMemory(wants, work.state.prompt_tokens, call.scale, call.logit_cap, rope)
            work.state.memory[call.index] = memory
        return memory

    def _select(
        self,
        work: Work,
        call: LayerCall,
        memory: LayerMemory,
        rows: dict[int, HeldRows],
        together: HeldRows | None,
    ) -> None:
        """Rules of the layer, over the rows of its heads; `together`: all heads hold the same ones."""
        for number, each in self._rules[work.phase].items():
            heads = [head for head in each.governed.get(call.index, ()) if head in rows]
            if not heads:
                continue
            if together is not None:
                states = [LayerState(self._inputs(work, call, memory, together, None), tuple(heads))]
            else:
                states = [
                    LayerState(self._inputs(work, call, memory, rows[head], head), (head,)) for head in heads
                ]
            offered = offer(each.rule, states, each.governed, work.state.prompt_tokens, work.tokens)
            if each.waits:
                work.offers.setdefault(number, []).append(offered)
                continue
            for unit, kept in choose(each.rule, [offered], each.governed, work.state.prompt_tokens).items():
                self._copy(work, unit, kept, rows[unit[1]])

    def _inputs(
        self, work: Work, call: LayerCall, memory: LayerMemory, held: HeldRows, head: int | None
    ) -> ScoreInputs:
        """Inputs of all heads of the layer, or of one."""
        needs, parts, group = self._wants[call.index].needs, self._parts, call.q.shape[1] // self._kv_heads
        mine = slice(None) if head is None else slice(head * group, (head + 1) * group)
        queries = None if memory.queries is None else memory.queries[:, mine]
        seen = 0 if queries is None else queries.shape[0]
        return ScoreInputs(
            k=held.k,
            v=held.v,
            candidates=(0, 0),
            scale=call.scale,
            logit_cap=call.logit_cap,
            layer=call.index,
            first_head=head or 0,
            positions=held.positions,
            q_obs=queries,
            q_positions=torch.arange(work.tokens - seen, work.tokens),
            running=memory.sums(),
            moments=memory.moments(),
            w_o=parts.w_o(call.layer_id)[mine] if "projected_l1" in needs else None,
            gram=parts.gram(call.layer_id)[mine] if "projected_l2" in needs else None,
            rope=parts.rope(call.layer_id) if "rope" in needs else None,
        )

    def _copy(self, work: Work, unit: Unit, kept: torch.Tensor, held: HeldRows) -> None:
        """Fill the compact head-pages of one unit with the kept ones of its rows."""
        compact = work.compact
        assert compact is not None
        assert compact.chosen is not None
        layer, head = unit
        number = layer * self._kv_heads + head
        positions = kept if held.positions is None else held.positions[kept]
        moved = positions < work.tokens - int(compact.chosen.left[number])
        pages = compact.place(number, layer, positions[moved].numpy(), work.tokens)
        copy_rows(held.k[:, 0], held.v[:, 0], kept[moved], self._pool.kv, torch.from_numpy(pages))
