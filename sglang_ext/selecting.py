"""Which rows stay when a prompt ends: score, select and copy, layer by layer, inside the forward of the last
chunk.

The scheduler has reserved the compact head-pages already (their number is known without scores); the forward
fills them after the layer's attention, while K is at hand.  The last queries of a prompt are carried across
its chunks: a last chunk may be one token long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kvir.kernels.ref.compact import compact as copy_rows
from kvir.kernels.ref.score_needs import observed_queries, term_scores, window
from kvir.kernels.ref.select_rule import LayerState, select_rule
from kvir.kernels.score_ops import ScoreInputs
from kvir.lowering.stages import ExecutionPlan
from kvir.policy_ir.nodes import Rule
from kvir.policy_ir.scores import Score
from kvir.sglang_ext.compact import Compact
from kvir.sglang_ext.pool import KvirPool
from kvir.sglang_ext.requests import RequestState

if TYPE_CHECKING:
    from kvir.sglang_ext.allocator import KvirAllocator


@dataclass(frozen=True)
class LayerRule:
    """One rule by score in one layer, and the KV heads that it governs."""

    rule: Rule
    heads: tuple[int, ...]


@dataclass(frozen=True)
class Prompt:
    """One request of an extend: its span in the batch, and what it is to select when this chunk ends its
    prompt.
    """

    state: RequestState
    begin: int  # rows [begin, end) of the batch
    end: int
    start: int  # tokens before the chunk
    compact: Compact | None


class PromptSelection:
    """What a plan selects at the end of a prompt, and the state that this takes across chunks."""

    def __init__(self, plan: ExecutionPlan) -> None:
        rules = plan.policy.rules
        self.kv_heads = plan.layout.kv_heads
        self.by_layer: list[tuple[LayerRule, ...]] = []
        for layer in plan.budgeted.prefill:
            heads: dict[int, list[int]] = {}
            for head, retention in enumerate(layer):
                if retention.selection is not None:
                    heads.setdefault(retention.selection.rule, []).append(head)
            self.by_layer.append(tuple(LayerRule(rules[i], tuple(h)) for i, h in sorted(heads.items())))
        self.window_tokens = max((window(score) for score in scores_of(plan)), default=0)

    def prompts(self, allocator: KvirAllocator, starts: list[int], lens: list[int]) -> list[Prompt]:
        """The requests of the extend that is launched now, in batch order."""
        found: list[Prompt] = []
        begin = 0
        for (state, _, _), compact, start, length in zip(
            allocator.extending, allocator.compacting, starts, lens, strict=True
        ):
            found.append(Prompt(state, begin, begin + length, start, compact))
            begin += length
        return found

    def observe(
        self,
        prompts: list[Prompt],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pool: KvirPool,
        pages: torch.Tensor,
        unit0: int,
        scale: float,
        logit_cap: float,
    ) -> None:
        """Keep the last queries of each prompt; where a prompt ends, score, select and copy."""
        layer = unit0 // self.kv_heads
        entries = self.by_layer[layer]
        if not entries:
            return
        for i, prompt in enumerate(prompts):
            span = slice(prompt.begin, prompt.end)
            queries = q[span][-self.window_tokens :]
            before = prompt.state.queries.pop(layer, None)
            if before is not None:
                queries = torch.cat([before, queries])[-self.window_tokens :]
            if prompt.compact is None:
                prompt.state.queries[layer] = queries.clone()
                continue
            prefix = pool.table[
                pages[i, : -(-prompt.start // pool.page_size)].long(), unit0 : unit0 + self.kv_heads
            ]
            chunk = Chunk(k[span], v[span], prefix, prompt.start)
            select_and_copy(
                entries, chunk, queries, pool.kv, prompt.compact,
                layer=layer, unit0=unit0, scale=scale, logit_cap=logit_cap,
            )  # fmt: skip


def scores_of(plan: ExecutionPlan) -> list[Score]:
    """Every score that some unit of the plan selects by when a prompt ends."""
    used = {r.selection.rule for layer in plan.budgeted.prefill for r in layer if r.selection is not None}
    return [score for i in sorted(used) for term in plan.policy.rules[i].keep for score in term_scores(term)]


def observed_tokens(plan: ExecutionPlan) -> int | None:
    """Queries at a prompt's end that must be computed, not taken from the prefix cache; None: all of them."""
    counts = [observed_queries(score) for score in scores_of(plan)]
    return None if None in counts else max((n for n in counts if n is not None), default=0)


@dataclass(frozen=True)
class Chunk:
    """One request's part of an extend, in one layer."""

    k: torch.Tensor  # [T, Hkv, D]
    v: torch.Tensor
    prefix: torch.Tensor  # int [pages, Hkv], head-pages of the prefix
    start: int  # tokens before the chunk


def select_and_copy(
    entries: Sequence[LayerRule],
    chunk: Chunk,
    q_obs: torch.Tensor,
    kv: torch.Tensor,
    compact: Compact,
    *,
    layer: int,
    unit0: int,
    scale: float,
    logit_cap: float,
) -> None:
    """Fill the compact head-pages of one request in one layer."""
    k, v = _all_rows(chunk, kv)
    for entry in entries:
        inputs = ScoreInputs(
            k=k, v=v, candidates=(0, 0), scale=scale, logit_cap=logit_cap, layer=layer, q_obs=q_obs
        )
        kept = select_rule(entry.rule, [LayerState(inputs, entry.heads)], prompt=compact.tokens)
        for head in entry.heads:
            unit = unit0 + head
            rows = kept[layer, head]
            rows = rows[rows < compact.tokens - int(compact.chosen.left[unit])]
            if len(rows) != compact.chosen.copied[unit]:
                wanted = compact.chosen.copied[unit]
                raise RuntimeError(f"kvir: unit {unit} selected {len(rows)} rows, not {wanted}")
            pages = torch.from_numpy(compact.table[:, unit].astype("int64"))
            copy_rows(k[:, head], v[:, head], rows, kv, pages[pages >= 0])


def _all_rows(chunk: Chunk, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [n, Hkv, D] of the whole prompt: the prefix from the pool, the chunk as it was computed."""
    if not chunk.start:
        return chunk.k, chunk.v
    # [pages, Hkv, 2, P, D] -> [2, pages * P, Hkv, D]
    rows = kv[chunk.prefix.long()].permute(2, 0, 3, 1, 4).flatten(1, 2)[:, : chunk.start]
    return torch.cat([rows[0], chunk.k]), torch.cat([rows[1], chunk.v])
