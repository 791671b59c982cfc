"""The oracle for policies that keep rows by score: kept sets in plain torch, then masks as for any policy.

A request is forced in two passes.  The first reads the prompt alone, every query as prefill has it, and asks
each layer what it offers; then `choose` of the reference decides, rivals of all layers at hand.  The second
is the oracle's own, where queries of decode see only the rows that stay; selections of decode are carried out
in it layer by layer, token after token, since a layer's queries and keys are all known when it is computed.

A request that was taken back was prefilled anew, outputs and all, and selected again at its new length: it is
several requests to the oracle (`replays`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evaluation.merging_head import MergingHead
from evaluation.oracle import Forced, Masks, Oracle
from evaluation.rounding import Rounding
from evaluation.selection_inputs import inputs_of, of_head
from evaluation.selection_rules import ends, fires, governed_units
from evaluation.server import Served
from kvir.kernels.ref.select_offer import Governed, LayerState, Offer, offer
from kvir.kernels.ref.select_rule import choose
from kvir.kernels.score_ops import Rope, ScoreInputs
from kvir.lowering.compact import runs_in_prefill
from kvir.lowering.stages import ExecutionPlan
from kvir.policy_ir.nodes import Rule
from kvir.policy_ir.rules import Merge, PrefillChunk


class SelectionOracle(Oracle):
    """An oracle of a plan in which some units select when a prompt ends."""

    def __init__(self, model: Path, plan: ExecutionPlan) -> None:
        super().__init__(model, Masks.of(plan.budgeted))
        self._plan = plan
        self._index = {layer.layer_id: i for i, layer in enumerate(plan.model.layers)}
        governed = governed_units(plan.budgeted.prefill)
        self._blocks = {number: heads for number, heads in governed.items() if self._block(number)}
        self._governed = {number: heads for number, heads in governed.items() if not self._block(number)}
        self._in_blocks: dict[int, Tensor] = {}  # KV head -> bool [prompt, prompt], of the layer at hand
        self._later = governed_units(plan.budgeted.decode)
        self._visible: dict[int, Tensor] = {}  # KV head -> bool [decode queries, keys], of the layer at hand
        self._merged: dict[
            int, Tensor
        ] = {}  # KV head -> outputs [decode queries, G, D], of the layer at hand
        self._offers: dict[int, list[Offer]] | None = None  # while the first pass runs
        self._rope: Rope | None = None
        self.kept: dict[tuple[int, int], Tensor] = {}  # (layer_id, KV head) -> bool [prompt]
        self.rounding: Rounding | None = None  # what scores read is a little off, as in another engine

    @torch.no_grad()
    def force(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], *, prefill_tokens: int | None = None
    ) -> Forced:
        self.kept = self.select(prompt_ids)
        return super().force(prompt_ids, output_ids, prefill_tokens=prefill_tokens)

    @torch.no_grad()
    def select(self, prompt_ids: Sequence[int]) -> dict[tuple[int, int], Tensor]:
        """Which rows of a prompt stay; empty if it is not compacted."""
        n = len(prompt_ids)
        if not self._compacts(n):
            return {}
        self.kept, self._offers, self._prompt_tokens = {}, {}, n
        try:
            if self._rope is None:
                self._rope = self._rotation()
            self.model(torch.tensor([list(prompt_ids)]), use_cache=False, logits_to_keep=1)
            offers = self._offers
        finally:
            self._offers = None
        kept: dict[tuple[int, int], Tensor] = {}
        ids = [layer.layer_id for layer in self._plan.model.layers]
        for number, governed in self._governed.items():
            rule = self._plan.policy.rules[number]
            if not ends(rule, n):
                continue
            for (layer, head), rows in choose(rule, offers[number], governed, n).items():
                mask = torch.zeros(n, dtype=torch.bool)
                mask[rows] = True
                kept[ids[layer], head] = mask
        return kept

    # ---- parts ---------------------------------------------------------------------------------------------

    def _attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        self._visible, self._in_blocks, self._merged = {}, {}, {}
        if self._blocks and self._compacts(self._prompt_tokens):
            self._in_blocks = self._read_in_blocks(module, q, k, v, kwargs)
        if self._offers is not None:
            self._offer(module, q, k, v, kwargs)
        elif self._later:
            self._visible = self._simulate(module, q, k, v, kwargs)
        out, none = super()._attend(module, query, key, value, *args, **kwargs)
        for head, merged in self._merged.items():
            group = q.shape[1] // k.shape[1]
            out[0, self._prompt_tokens :, head * group : (head + 1) * group] = merged
        return out, none

    def _block(self, number: int) -> int | None:
        """Tokens of a prompt between two selections of a rule; None: it selects once, at the end."""
        rule = self._plan.policy.rules[number]
        return next((t.tokens for t in rule.trigger if isinstance(t, PrefillChunk)), None)

    def _compacts(self, prompt: int) -> bool:
        selections = [r.selection for layer in self._plan.budgeted.prefill for r in layer]
        return any(s is not None and runs_in_prefill(s, prompt) for s in selections)

    def _read_in_blocks(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]
    ) -> dict[int, Tensor]:
        """What each head that selects after blocks of a prompt shows to every query of the prompt; what is
        left at its end goes to `kept`.
        """
        layer, prompt = self._index[module.layer_idx], self._prompt_tokens
        seen: dict[int, Tensor] = {}
        for number, governed in self._blocks.items():
            rule, block = self._plan.policy.rules[number], self._block(number)
            mine = governed.get(layer, ())
            assert block is not None
            held = {head: torch.zeros(prompt, dtype=torch.bool) for head in mine}
            seen |= {head: torch.zeros(prompt, prompt, dtype=torch.bool) for head in mine}
            for start in range(0, prompt, block) if mine else ():
                stop = min(prompt, start + block)
                own = torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
                for head in mine:
                    seen[head][start:stop] = held[head]
                    seen[head][start:stop, start:stop] = own
                    held[head][start:stop] = True
                self._fold(rule, governed, module, q[:stop], k, v, options, held, {})
            for head in mine:
                self.kept[module.layer_idx, head] = held[head]
        return seen

    def _fold(
        self,
        rule: Rule,
        governed: Governed,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: Mapping[str, Any],
        held: dict[int, Tensor],
        merging: Mapping[int, MergingHead],
    ) -> None:
        """One selection of a rule in one layer, after the queries q: held rows are updated.  Heads that merge
        hold rows of their own.
        """
        layer, states = self._index[module.layer_idx], list[LayerState]()
        group = q.shape[1] // k.shape[1]
        for head in governed[layer]:
            rows = held[head].nonzero()[:, 0]
            mine, bias = (k, v), None
            if head in merging:
                mine, bias = merging[head].rows(), merging[head].bias[rows, None]
            inputs = self._inputs(rule, module, q, mine[0][rows], mine[1][rows], options)
            of_one = replace(of_head(inputs, head, group, rows, q.shape[0]), bias=bias)
            states.append(LayerState(of_one, (head,)))
        offered = offer(rule, states, governed, self._prompt_tokens, q.shape[0])
        for (_, head), kept in choose(rule, [offered], governed, self._prompt_tokens).items():
            rows = held[head].nonzero()[:, 0]
            if head in merging:
                merging[head].fold(q.shape[0], rows, kept, offered.units[head].candidates)
            held[head] = torch.zeros_like(held[head])
            held[head][rows[kept]] = True

    def _prefill_sees(self, layer: int, head: int, queries: Tensor, keys: Tensor) -> Tensor:
        seen = self._in_blocks.get(head)
        if seen is None:
            return super()._prefill_sees(layer, head, queries, keys)
        out = torch.zeros(len(queries), len(keys), dtype=torch.bool)
        of_prompt = queries < self._prompt_tokens
        width = min(len(keys), self._prompt_tokens)
        out[of_prompt, :width] = seen[queries[of_prompt]][:, :width]
        return out

    def _decode_sees(self, layer: int, head: int, queries: Tensor, keys: Tensor) -> Tensor:
        seen = self._visible.get(head)
        if seen is not None:
            return seen[(queries - self._prompt_tokens).clamp_min(0)][:, keys]
        kept = self.kept.get((layer, head))
        if kept is None:
            return super()._decode_sees(layer, head, queries, keys)
        stays = torch.ones(len(keys), dtype=torch.bool)
        stays[: len(kept)] = kept[: len(keys)]
        return stays & (keys <= queries[:, None])

    def _simulate(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]
    ) -> dict[int, Tensor]:
        """What each head that selects while decoding shows to every query of decode."""
        layer, total, prompt = self._index[module.layer_idx], q.shape[0], self._prompt_tokens
        heads = sorted(head for governed in self._later.values() for head in governed.get(layer, ()))
        held: dict[int, Tensor] = {}
        for head in heads:
            held[head] = torch.zeros(total, dtype=torch.bool)
            held[head][:prompt] = self.kept.get(
                (module.layer_idx, head), torch.ones(prompt, dtype=torch.bool)
            )
        visible = {head: torch.zeros(total - prompt, total, dtype=torch.bool) for head in heads}
        merging = {
            head: MergingHead(overflow, q, k, v, head, options, total - prompt)
            for number, governed in self._later.items()
            for head in governed.get(layer, ())
            if isinstance(overflow := self._plan.policy.rules[number].overflow, Merge)
        }
        self._merged = {head: one.out for head, one in merging.items()}
        for query in range(prompt, total):
            for head in heads:
                held[head][query] = True
                visible[head][query - prompt] = held[head]
                if head in merging:
                    merging[head].attend(query, query - prompt, held[head])
            for number, governed in self._later.items():
                mine = governed.get(layer, ())
                rule = self._plan.policy.rules[number]
                most = max((int(held[head].sum()) for head in mine), default=0)
                if not mine or not fires(rule, query + 1 - prompt, most):
                    continue
                self._fold(rule, governed, module, q[: query + 1], k, v, options, held, merging)
        return visible

    def _offer(self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> None:
        """q [n, Hq, D], k and v [n, Hkv, D] of one layer, after rotation."""
        assert self._offers is not None
        layer = self._index[module.layer_idx]
        for number, governed in self._governed.items():
            if layer not in governed:
                continue
            rule = self._plan.policy.rules[number]
            n, heads = q.shape[0], governed[layer]
            inputs = self._inputs(rule, module, q, k, v, options)
            states = [LayerState(inputs, heads)]
            if len(heads) < k.shape[1]:
                every, group = torch.arange(n), q.shape[1] // k.shape[1]
                states = [LayerState(of_head(inputs, h, group, every, n), (h,)) for h in heads]
            self._offers.setdefault(number, []).append(offer(rule, states, governed, n, n))

    def _inputs(
        self, rule: Rule, module: Any, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]
    ) -> ScoreInputs:
        layer = self._index[module.layer_idx]
        if self.rounding is not None:
            q, k, v = (self.rounding.off(x) for x in (q, k, v))
        return inputs_of(rule, module, layer, q, k, v, options, self._rope)

    def _rotation(self) -> Rope | None:
        """The tables of the model's rotation up to its context; None if it has none of its own."""
        rotary: Any = getattr(self.model.model, "rotary_emb", None)
        if rotary is None:
            return None
        positions = torch.arange(self._plan.model.context_tokens)
        cos, sin = rotary(torch.zeros(1, 1), positions[None])
        half = cos.shape[-1] // 2  # transformers writes every angle twice
        return Rope(cos[0, :, :half].float(), sin[0, :, :half].float())


def replays(served: Sequence[Served], prefills: Mapping[str, Sequence[int]]) -> list[Served]:
    """Served requests as the oracle must force them: one for each time that they were prefilled.

    `prefills`: by request id, the lengths at which prefills ended, first to last; a request that is not in it
    was prefilled once.
    """
    found: list[Served] = []
    for answer in served:
        n = len(answer.prompt_ids)
        starts = [length - n for length in prefills.get(answer.meta["id"], ())] or [0]
        if starts[0] != 0 or len(starts) != answer.retractions + 1:
            raise ValueError(
                f"request of {n} tokens, {answer.retractions} times retracted: prefills {starts}"
            )
        for start, stop in zip(starts, [*starts[1:], len(answer.output_ids)], strict=True):
            if start == stop:
                continue  # taken back before it gave a token
            found.append(
                replace(
                    answer,
                    prompt_ids=(*answer.prompt_ids, *answer.output_ids[:start]),
                    output_ids=answer.output_ids[start:stop],
                    logprobs=answer.logprobs[start:stop],
                    top=answer.top[start:stop],
                )
            )
    return found
