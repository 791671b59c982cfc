"""Which rows stay when a prompt ends: score, select and copy, inside the forward of the last chunk.

The scheduler has reserved the compact head-pages already.  Each layer scores its rows after its attention,
while K is at hand.  A unit whose rivals are all in its layer is copied there and then; where layers compete,
each leaves its scores, and the last of them selects and copies for all, from the dense pages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvir.kernels.ref.compact import compact as copy_rows
from kvir.kernels.ref.score_needs import observed_queries, term_scores
from kvir.kernels.ref.select_rule import Governed, LayerState, Offer, Unit, choose, offer, spans_layers
from kvir.kernels.score_ops import ScoreInputs
from kvir.lowering.stages import ExecutionPlan
from kvir.policy_ir.nodes import Rule
from kvir.policy_ir.scores import Score
from kvir.sglang_ext.compact import Compact
from kvir.sglang_ext.geometry import IntArray
from kvir.sglang_ext.model_parts import ModelParts, needed
from kvir.sglang_ext.observing import LayerMemory, Wants
from kvir.sglang_ext.pool import KvirPool
from kvir.sglang_ext.requests import RequestState

if TYPE_CHECKING:
    from kvir.sglang_ext.allocator import KvirAllocator


@dataclass(frozen=True)
class Selecting:
    """One rule by score, and the units that it governs."""

    rule: Rule
    governed: Governed

    @property
    def last_layer(self) -> int:
        return max(self.governed)

    @property
    def waits(self) -> bool:
        return spans_layers(self.rule)


@dataclass
class Prompt:
    """One request of an extend: its span in the batch, and what it is to select when this chunk ends its
    prompt.
    """

    state: RequestState
    begin: int  # rows [begin, end) of the batch
    end: int
    start: int  # tokens before the chunk
    pages: IntArray  # logical pages of all its tokens
    compact: Compact | None
    offers: dict[int, list[Offer]] = field(default_factory=dict[int, list[Offer]])  # by rule


@dataclass(frozen=True)
class LayerCall:
    """One layer of an extend, as the attention backend computes it."""

    index: int  # among the layers with a KV cache
    layer_id: int  # SGLang's
    q: torch.Tensor  # [T, Hq, D]
    k: torch.Tensor  # [T, Hkv, D]
    v: torch.Tensor
    scale: float
    logit_cap: float


class PromptSelection:
    """What a plan selects at the end of a prompt."""

    def __init__(self, plan: ExecutionPlan, pool: KvirPool, model: torch.nn.Module) -> None:
        self._pool = pool
        self._kv_heads = plan.layout.kv_heads
        self._rules = selecting_rules(plan)
        self._wants: dict[int, Wants] = {}
        for layer in sorted({layer for each in self._rules.values() for layer in each.governed}):
            rules = [each.rule for each in self._rules.values() if layer in each.governed]
            self._wants[layer] = Wants.of(s for rule in rules for s in rule_scores(rule))
        layer_ids = [layer.layer_id for layer in plan.model.layers]
        self._parts: ModelParts = needed(model, {layer_ids[i]: w.needs for i, w in self._wants.items()})

    def prompts(self, allocator: KvirAllocator, starts: list[int], lens: list[int]) -> list[Prompt]:
        """The requests of the extend that is launched now, in batch order."""
        found: list[Prompt] = []
        begin = 0
        for (state, _, _), compact, start, length in zip(
            allocator.extending, allocator.compacting, starts, lens, strict=True
        ):
            pages = np.array(state.pages, np.int64)
            found.append(Prompt(state, begin, begin + length, start, pages, compact))
            begin += length
        return found

    def observe(self, prompts: list[Prompt], call: LayerCall) -> None:
        """After a layer's attention: keep what scores need; where a prompt ends, score, select and copy."""
        wants = self._wants.get(call.index)
        if wants is None:
            return
        for prompt in prompts:
            if not prompt.state.selects:
                continue
            span = slice(prompt.begin, prompt.end)
            memory = prompt.state.memory.pop(call.index, None)
            if memory is None:
                rope = self._parts.rope(call.layer_id) if "rope" in wants.needs else None
                memory = LayerMemory(wants, prompt.state.prompt_tokens, call.scale, call.logit_cap, rope)
            k = v = None
            if wants.running or prompt.compact is not None:
                k, v = self._all_rows(prompt, call)
            memory.feed(call.q[span], k, prompt.start)
            if prompt.compact is None:
                prompt.state.memory[call.index] = memory
                continue
            assert k is not None
            assert v is not None
            self._select(prompt, self._inputs(call, wants, memory, k, v))

    def after_append(self, prompts: list[Prompt], layer: int) -> None:
        """Every row of this layer is in its dense pages: rules that end here and span layers are decided."""
        last = layer == max(self._wants)
        for prompt in prompts:
            if prompt.compact is None:
                continue
            for number, offers in list(prompt.offers.items()):
                each = self._rules[number]
                if each.last_layer != layer:
                    continue
                del prompt.offers[number]
                for unit, rows in choose(each.rule, offers, each.governed, prompt.compact.tokens).items():
                    k, v = self._rows_of(prompt, unit)
                    self._copy(prompt.compact, unit, rows, k, v)
            if last:
                self._pool.residency.compacts.publish(prompt.compact)

    # ---- parts ---------------------------------------------------------------------------------------------

    def _select(self, prompt: Prompt, inputs: ScoreInputs) -> None:
        assert prompt.compact is not None
        layer, tokens = inputs.layer, prompt.compact.tokens
        for number, each in self._rules.items():
            if layer not in each.governed:
                continue
            heads = each.governed[layer]
            offered = offer(each.rule, LayerState(inputs, heads), each.governed, tokens)
            if each.waits:
                prompt.offers.setdefault(number, []).append(offered)
                continue
            for unit, rows in choose(each.rule, [offered], each.governed, tokens).items():
                self._copy(prompt.compact, unit, rows, inputs.k[:, unit[1]], inputs.v[:, unit[1]])

    def _inputs(
        self, call: LayerCall, wants: Wants, memory: LayerMemory, k: torch.Tensor, v: torch.Tensor
    ) -> ScoreInputs:
        needs, parts = wants.needs, self._parts
        return ScoreInputs(
            k=k,
            v=v,
            candidates=(0, 0),
            scale=call.scale,
            logit_cap=call.logit_cap,
            layer=call.index,
            q_obs=memory.queries,
            running=memory.sums(),
            moments=memory.moments(),
            w_o=parts.w_o(call.layer_id) if "projected_l1" in needs else None,
            gram=parts.gram(call.layer_id) if "projected_l2" in needs else None,
            rope=parts.rope(call.layer_id) if "rope" in needs else None,
        )

    def _copy(
        self, compact: Compact, unit: Unit, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Fill the compact head-pages of one unit; k, v [n, D]."""
        layer, head = unit
        number = layer * self._kv_heads + head
        rows = rows[rows < compact.tokens - int(compact.chosen.left[number])]
        pages = compact.place(number, layer, len(rows), self._pool.page_size)
        copy_rows(k, v, rows, self._pool.kv, torch.from_numpy(pages))

    def _all_rows(self, prompt: Prompt, call: LayerCall) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, Hkv, D] of all tokens so far: the prefix from the pool, the chunk as computed."""
        span = slice(prompt.begin, prompt.end)
        k, v = call.k[span], call.v[span]
        if not prompt.start:
            return k, v
        pool, unit = self._pool, call.index * self._kv_heads
        pages = torch.from_numpy(prompt.pages[: -(-prompt.start // pool.page_size)])
        head_pages = pool.table[pages, unit : unit + self._kv_heads].long()
        # [pages, Hkv, 2, P, D] -> [2, pages * P, Hkv, D]
        rows = pool.kv[head_pages].permute(2, 0, 3, 1, 4).flatten(1, 2)[:, : prompt.start]
        return torch.cat([rows[0], k]), torch.cat([rows[1], v])

    def _rows_of(self, prompt: Prompt, unit: Unit) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, D] of one unit, from its dense pages."""
        assert prompt.compact is not None
        layer, head = unit
        pages = torch.from_numpy(prompt.pages)
        head_pages = self._pool.table[pages, layer * self._kv_heads + head].long()
        rows = self._pool.kv[head_pages].transpose(0, 1).flatten(1, 2)[:, : prompt.compact.tokens]
        return rows[0], rows[1]


def selecting_rules(plan: ExecutionPlan) -> dict[int, Selecting]:
    """Rules that select when a prompt ends, by their number in the policy."""
    governed: dict[int, dict[int, list[int]]] = {}
    for layer, retentions in enumerate(plan.budgeted.prefill):
        for head, retention in enumerate(retentions):
            if retention.selection is not None:
                governed.setdefault(retention.selection.rule, {}).setdefault(layer, []).append(head)
    return {
        number: Selecting(plan.policy.rules[number], {layer: tuple(heads) for layer, heads in layers.items()})
        for number, layers in sorted(governed.items())
    }


def rule_scores(rule: Rule) -> list[Score]:
    return [score for term in rule.keep for score in term_scores(term)]


def observed_tokens(plan: ExecutionPlan) -> int | None:
    """Queries at a prompt's end that must be computed, not taken from the prefix cache; None: all of them."""
    rules = selecting_rules(plan).values()
    counts = [observed_queries(score) for each in rules for score in rule_scores(each.rule)]
    return None if None in counts else max((n for n in counts if n is not None), default=0)
