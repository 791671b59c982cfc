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

from evaluation.oracle import Forced, Masks, Oracle
from evaluation.server import Served
from kvir.kernels.ref.score_expected import QueryMoments
from kvir.kernels.ref.score_needs import needs, running, skips, term_scores, window
from kvir.kernels.ref.score_running import ChunkSums, ColumnSums, log_sum_exp
from kvir.kernels.ref.select_offer import Governed, LayerState, Offer, offer
from kvir.kernels.ref.select_rule import choose
from kvir.kernels.score_ops import Rope, Running, RunningScore, ScoreInputs, Sums
from kvir.lowering.compact import runs_in_prefill
from kvir.lowering.stages import ExecutionPlan, Retention
from kvir.policy_ir.nodes import Rule
from kvir.policy_ir.rules import Every, Over
from kvir.policy_ir.scores import Noncausal, Persistent

Kept = Mapping[tuple[int, int], Tensor]  # (layer_id, KV head) -> bool [prompt]


class SelectionOracle(Oracle):
    """An oracle of a plan in which some units select when a prompt ends."""

    def __init__(self, model: Path, plan: ExecutionPlan) -> None:
        super().__init__(model, Masks.of(plan.budgeted))
        self._plan = plan
        self._index = {layer.layer_id: i for i, layer in enumerate(plan.model.layers)}
        self._governed = _governed(plan.budgeted.prefill)
        self._later = _governed(plan.budgeted.decode)
        self._visible: dict[int, Tensor] = {}  # KV head -> bool [decode queries, keys], of the layer at hand
        self._offers: dict[int, list[Offer]] | None = None  # while the first pass runs
        self._rope: Rope | None = None
        self.kept: Kept = {}

    @torch.no_grad()
    def force(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], *, prefill_tokens: int | None = None
    ) -> Forced:
        self.kept = self.select(prompt_ids)
        return super().force(prompt_ids, output_ids, prefill_tokens=prefill_tokens)

    @torch.no_grad()
    def select(self, prompt_ids: Sequence[int]) -> Kept:
        """Which rows of a prompt stay; empty if it is not compacted."""
        n = len(prompt_ids)
        selections = [r.selection for layer in self._plan.budgeted.prefill for r in layer]
        if not any(s is not None and runs_in_prefill(s, n) for s in selections):
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
        self._visible = {}
        if self._offers is not None:
            self._offer(module, q, k, v, kwargs)
        elif self._later:
            self._visible = self._simulate(module, q, k, v, kwargs)
        return super()._attend(module, query, key, value, *args, **kwargs)

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
        for query in range(prompt, total):
            for head in heads:
                held[head][query] = True
                visible[head][query - prompt] = held[head]
            for number, governed in self._later.items():
                mine = governed.get(layer, ())
                rule = self._plan.policy.rules[number]
                most = max((int(held[head].sum()) for head in mine), default=0)
                if not mine or not _fires(rule, query + 1 - prompt, most):
                    continue
                states: list[LayerState] = []
                for head in mine:
                    rows = held[head].nonzero()[:, 0]
                    inputs = self._inputs(rule, module, layer, q[: query + 1], k[rows], v[rows], options)
                    states.append(LayerState(_of_head(inputs, head, k.shape[1], rows), (head,)))
                offered = offer(rule, states, governed, prompt, query + 1)
                for (_, head), kept in choose(rule, [offered], governed, prompt).items():
                    rows = held[head].nonzero()[:, 0][kept]
                    held[head] = torch.zeros(total, dtype=torch.bool)
                    held[head][rows] = True
        return visible

    def _offer(self, module: Any, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]) -> None:
        """q [n, Hq, D], k and v [n, Hkv, D] of one layer, after rotation."""
        assert self._offers is not None
        layer = self._index[module.layer_idx]
        for number, governed in self._governed.items():
            if layer not in governed:
                continue
            rule = self._plan.policy.rules[number]
            state = LayerState(self._inputs(rule, module, layer, q, k, v, options), governed[layer])
            n = q.shape[0]
            self._offers.setdefault(number, []).append(offer(rule, [state], governed, n, n))

    def _inputs(
        self, rule: Rule, module: Any, layer: int, q: Tensor, k: Tensor, v: Tensor, options: Mapping[str, Any]
    ) -> ScoreInputs:
        """Of all heads: every query so far, and the rows that are held."""
        scale, cap = options.get("scaling") or q.shape[-1] ** -0.5, options.get("softcap") or 0.0
        scores = [score for term in rule.keep for score in term_scores(term)]
        asked = {need for score in scores for need in needs(score)}
        observed = max(map(window, scores), default=0)
        moments: dict[int, QueryMoments] = {}
        for skip in {skip for score in scores for skip in skips(score)}:
            assert self._rope is not None
            moments[skip] = QueryMoments(q.shape[1], q.shape[2], self._rope, skip=skip)
            moments[skip].update(q, torch.arange(q.shape[0]))
        w_o = None
        if asked & {"projected_l1", "projected_l2"}:
            w_o = module.o_proj.weight.T.float().reshape(q.shape[1], q.shape[2], -1)
        return ScoreInputs(
            k=k,
            v=v,
            candidates=(0, 0),
            scale=scale,
            logit_cap=cap,
            layer=layer,
            q_obs=q[max(0, q.shape[0] - observed) :],
            running={spec: _sums(spec, q, k, scale, cap) for score in scores for spec in running(score)},
            moments={skip: m.moments() for skip, m in moments.items()},
            w_o=w_o,
            rope=self._rope,
        )

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


def _of_head(inputs: ScoreInputs, head: int, kv_heads: int, rows: Tensor) -> ScoreInputs:
    """Inputs of one head alone, which holds the rows at these positions."""
    assert inputs.q_obs is not None
    group, count = inputs.q_obs.shape[1] // kv_heads, inputs.q_obs.shape[0]
    mine = slice(head * group, (head + 1) * group)
    last = int(rows[-1])
    return replace(
        inputs,
        k=inputs.k[:, head : head + 1],
        v=inputs.v[:, head : head + 1],
        first_head=head,
        positions=rows,
        q_obs=inputs.q_obs[:, mine],
        q_positions=torch.arange(last + 1 - count, last + 1),
        w_o=None if inputs.w_o is None else inputs.w_o[mine],
    )


def _fires(rule: Rule, generated: int, held: int) -> bool:
    """After so many generated tokens, when a unit holds so many rows."""
    return any(
        (isinstance(t, Every) and generated % t.tokens == 0) or (isinstance(t, Over) and held > t.tokens)
        for t in rule.trigger
    )


def _governed(table: Sequence[Sequence[Retention]]) -> dict[int, Governed]:
    """By rule that selects: layer -> heads."""
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for layer, retentions in enumerate(table):
        for head, retention in enumerate(retentions):
            if retention.selection is not None:
                heads = found.setdefault(retention.selection.rule, {})
                heads[layer] = (*heads.get(layer, ()), head)
    return dict(sorted(found.items()))


def _sums(spec: RunningScore, q: Tensor, k: Tensor, scale: float, cap: float) -> Sums:
    positions = torch.arange(q.shape[0])
    sums: Running
    if isinstance(spec, Noncausal):
        sums = ChunkSums(spec, q.shape[1], scale, logit_cap=cap)
    else:
        history = spec.history if isinstance(spec, Persistent) else None
        first = 0 if history is None else max(0, q.shape[0] - history)
        sums = ColumnSums(spec, q.shape[1], scale, logit_cap=cap, first_query=first)
    sums.update(q, log_sum_exp(q, k, positions, scale, logit_cap=cap), k, positions)
    return sums.sums()
