"""Which rows stay: score, select and copy, inside the forward of a prompt's last chunk or of a decode step.

The scheduler has reserved the compact head-pages already.  Each layer scores its rows after its attention,
while the last queries are at hand.  A unit whose rivals are all in its layer is copied there and then; where
layers compete, each leaves its scores, and the last of them selects and copies for all, from the dense pages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvir.kernels.copy_ops import CopyKernels
from kvir.kernels.ref.prompt_inputs import of_query_heads
from kvir.kernels.ref.select_offer import LayerState, Offer, offer
from kvir.kernels.ref.select_rule import choose
from kvir.kernels.score_ops import ScoreInputs, SumKernels
from kvir.policy_ir.nodes import Phase
from kvir.sglang_ext.blocks import attend_block, blocks, extended, left
from kvir.sglang_ext.copying import RowCopier
from kvir.sglang_ext.forwards import LayerCall, Work, score_inputs, works_of
from kvir.sglang_ext.held_rows import HeldRows, RowReader
from kvir.sglang_ext.merging import reference
from kvir.sglang_ext.model_parts import ModelParts, needed
from kvir.sglang_ext.observing import LayerMemory, Wants
from kvir.sglang_ext.pool import KvirPool
from kvir.sglang_ext.ranks import Exchange
from kvir.sglang_ext.selecting_rules import Selecting, merge_queries, rule_scores, selecting_rules

if TYPE_CHECKING:
    from kvir.sglang_ext.allocator import KvirAllocator


class RowSelection:
    """What a plan selects, and what that takes to remember."""

    def __init__(
        self,
        pool: KvirPool,
        model: torch.nn.Module,
        exchange: Exchange | None,
        sums: SumKernels,
        copies: CopyKernels,
    ) -> None:
        self._pool, self._sums, plan = pool, sums, pool.plan
        self._rows, self._copier = RowReader(pool), RowCopier(pool, copies)
        self._kv_heads = plan.layout.kv_heads
        self._heads = pool.residency.geometry.own_heads  # this rank's; heads are counted through the model
        self._exchange = exchange
        self._group = plan.layout.query_heads // plan.layout.kv_heads
        self._rules: dict[Phase, dict[int, Selecting]] = {
            "prefill": selecting_rules(plan, "prefill"),
            "decode": selecting_rules(plan, "decode"),
        }
        self._wants: dict[int, Wants] = {}
        every = [each for rules in self._rules.values() for each in rules.values()]
        for layer in sorted({layer for each in every for layer in each.governed}):
            rules = [each.rule for each in every if layer in each.governed]
            self._wants[layer] = Wants.of(
                (s for rule in rules for s in rule_scores(rule)),
                at_least=max(map(merge_queries, rules), default=0),
            )
        self._blocks = {
            layer: [
                (number, each)
                for number, each in self._rules["prefill"].items()
                if each.block_tokens is not None and layer in each.governed
            ]
            for layer in self._wants
        }
        self._decoding = {layer for each in self._rules["decode"].values() for layer in each.governed}
        self._remembering = self._decoding  # layers whose last queries decode will ask for
        layer_ids = [layer.layer_id for layer in plan.model.layers]
        self._parts: ModelParts = needed(model, {layer_ids[i]: w.needs for i, w in self._wants.items()})

    def leave_decode(self) -> None:
        """Others carry out what is selected after the prompt."""
        self._remembering = set[int]()

    # ---- once per forward ----------------------------------------------------------------------------------

    def of_extend(self, allocator: KvirAllocator, starts: list[int], lens: list[int]) -> list[Work]:
        """The requests of the extend that is launched now, in batch order."""
        states = [state for state, _, _ in allocator.extending]
        return works_of(states, allocator.compacting, starts, lens, "prefill")

    def of_decode(self, allocator: KvirAllocator, lens: list[int]) -> list[Work]:
        """The same of a decode step; lens count the step's own token, those of padding come last."""
        if not self._decoding:
            return []
        lens = lens[: len(allocator.decoding)]
        starts = [length - 1 for length in lens]
        return works_of(allocator.decoding, allocator.compacting, starts, [1] * len(lens), "decode")

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
            elif work.state.selects or call.index in self._remembering:
                self._observe_chunk(work, call, wants)

    def heads_in_blocks(self, work: Work, layer: int) -> list[int]:
        """Heads of a request whose attention goes block by block (`attend_blocks`)."""
        if not work.state.selects:
            return []
        return sorted(h for _, each in self._blocks.get(layer, ()) for h in self._own(each, layer))

    def _own(self, each: Selecting, layer: int) -> list[int]:
        """Heads of a layer that a rule governs, those of this rank."""
        return [head for head in each.governed.get(layer, ()) if head in self._heads]

    def attend_blocks(self, work: Work, call: LayerCall, out: torch.Tensor) -> None:
        """Attention and selections of those heads; out [T, Hq, D] of the batch is written."""
        memory = self._memory(work, call, self._wants[call.index])
        span = slice(work.begin, work.end)
        prompt = work.state.prompt_tokens
        q, k, v = call.q[span], call.k[span], call.v[span]
        before = memory.queries
        for number, each in self._blocks[call.index]:
            assert each.block_tokens is not None
            memory.queries = before
            held = {
                head: self._rows.before((call.index, head), work.pages, work.start, work.state.compact)
                for head in self._own(each, call.index)
            }
            for block in blocks(work.start, work.tokens, prompt, each.block_tokens):
                part = slice(block.start - work.start, block.stop - work.start)
                rows = slice(work.begin + part.start, work.begin + part.stop)
                for head, old in held.items():
                    i, heads = head - self._heads.start, self._query_heads(head)
                    out[rows, heads] = attend_block(
                        q[part, heads], old, k[part, i], v[part, i], call.scale, call.logit_cap
                    )
                    held[head] = extended(old, k[part, i], v[part, i], block.start)
                memory.remember(q[part])
                # before the first block that can drop rows, a prefix hit may have left too few queries
                if block.ends and block.stop >= work.state.first_drop_tokens:
                    offered = self._offer(work, call, memory, number, held, block.stop)
                    for (_, head), kept in choose(each.rule, [offered], each.governed, prompt).items():
                        held[head] = left(held[head], kept)
            for head, rows_left in held.items():
                self._copier.copy(work, [(call.index, head)], None, rows_left)

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
                    self._copier.copy(work, [unit], [rows], self._rows.dense(unit, work.pages, work.tokens))
            if layer == max(self._wants):
                if self._exchange is not None:
                    self._exchange.complete(work.compact)
                self._pool.residency.compacts.publish(work.compact)

    # ---- parts ---------------------------------------------------------------------------------------------

    def _observe_chunk(self, work: Work, call: LayerCall, wants: Wants) -> None:
        memory = self._memory(work, call, wants)
        span = slice(work.begin, work.end)
        selects = work.state.selects
        if not (selects and self._blocks[call.index]):  # else block by block
            memory.remember(call.q[span])
        if not selects:
            return
        done, held = work.tokens == work.state.prompt_tokens, None
        if wants.running or (work.compact is not None and done):
            held = self._rows.prompt(call.index, work.pages, work.start, call.k[span], call.v[span])
        memory.add_up(call.q[span], None if held is None else held.k, work.start)
        if not done:
            return
        chosen = None if work.compact is None else work.compact.chosen
        if chosen is not None and held is not None:
            unit0, apart = call.index * self._kv_heads, self.heads_in_blocks(work, call.index)
            heads = [h for h in self._heads if chosen.moves[unit0 + h] and h not in apart]
            self._select(work, call, memory, {h: held.of(h - self._heads.start) for h in heads}, held)
        memory.forget_sums()
        if call.index not in self._remembering:
            del work.state.memory[call.index]

    def _observe_step(self, work: Work, call: LayerCall) -> None:
        memory = self._memory(work, call, self._wants[call.index])
        memory.remember(call.q[work.begin : work.end])
        chosen = None if work.compact is None else work.compact.chosen
        if work.compact is None or chosen is None:
            return
        unit0 = call.index * self._kv_heads
        heads = [h for h in self._heads if chosen.moves[unit0 + h]]
        if not heads:
            return
        if any(work.compact.moved[unit0 + h] for h in heads):
            rows = {h: self._rows.unit((call.index, h), work.pages, work.tokens, work.compact) for h in heads}
            self._select(work, call, memory, rows, None)
            return
        held = self._rows.layer(call.index, work.pages, work.tokens)
        self._select(work, call, memory, {h: held.of(h - self._heads.start) for h in heads}, held)

    def _memory(self, work: Work, call: LayerCall, wants: Wants) -> LayerMemory:
        memory = work.state.memory.get(call.index)
        if memory is None:
            rope = self._parts.rope(call.layer_id) if "rope" in wants.needs else None
            memory = LayerMemory(
                wants, work.state.prompt_tokens, call.scale, call.logit_cap, rope, self._sums
            )
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
        prompt = work.state.prompt_tokens
        for number, each in self._rules[work.phase].items():
            mine = {head: rows[head] for head in each.governed.get(call.index, ()) if head in rows}
            if not mine:
                continue
            offered = self._offer(work, call, memory, number, mine, work.tokens, together)
            if each.waits:
                work.offers.setdefault(number, []).append(offered)
                continue
            fold = reference(each.rule, memory.queries, work.tokens, call)
            stay = choose(each.rule, [offered], each.governed, prompt)
            if fold is None and together is not None:
                of_layer = together.of(*(head - self._heads.start for _, head in stay))
                self._copier.copy(work, list(stay), list(stay.values()), of_layer)
                continue
            for unit, kept in stay.items():
                held, head = rows[unit[1]], unit[1]
                if fold is None:
                    self._copier.copy(work, [unit], [kept], held)
                else:
                    merged = fold.apply(held, kept, offered.units[head].candidates, self._query_heads(head))
                    self._copier.copy(work, [unit], None, merged)

    def _offer(
        self,
        work: Work,
        call: LayerCall,
        memory: LayerMemory,
        number: int,
        rows: dict[int, HeldRows],
        tokens: int,
        together: HeldRows | None = None,
    ) -> Offer:
        """What a rule's heads put up at length `tokens`; `together`: the layer's rows, if all hold them."""
        each, of_layer = self._rules[work.phase][number], self._inputs(call, memory, tokens)
        if together is not None and len(rows) == len(self._heads):
            states = [LayerState(replace(of_layer, k=together.k, v=together.v), tuple(rows))]
        else:
            states = [LayerState(self._of_head(of_layer, head, held), (head,)) for head, held in rows.items()]
        return offer(each.rule, states, each.governed, work.state.prompt_tokens, tokens)

    def _inputs(self, call: LayerCall, memory: LayerMemory, tokens: int) -> ScoreInputs:
        """Of all heads of a layer, without the rows."""
        inputs = score_inputs(self._wants[call.index].needs, self._parts, call, memory)
        seen = 0 if inputs.q_obs is None else inputs.q_obs.shape[0]
        positions = torch.arange(tokens - seen, tokens, device=call.q.device)
        return replace(inputs, q_positions=positions, first_head=self._heads.start)

    def _of_head(self, inputs: ScoreInputs, head: int, held: HeldRows) -> ScoreInputs:
        mine = of_query_heads(inputs, self._query_heads(head))
        bias = None if held.bias is None else held.bias[:, None]
        return replace(mine, k=held.k, v=held.v, first_head=head, positions=held.positions, bias=bias)

    def _query_heads(self, head: int) -> slice:
        """Those of a KV head, among this rank's."""
        first = (head - self._heads.start) * self._group
        return slice(first, first + self._group)
