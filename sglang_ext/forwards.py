"""What one forward, and one layer of it, is to the selection of rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvir.kernels.ref.select_offer import Offer
from kvir.kernels.score_ops import Need, ScoreInputs
from kvir.policy_ir.nodes import Phase
from kvir.sglang_ext.compact import Compact
from kvir.sglang_ext.geometry import IntArray
from kvir.sglang_ext.model_parts import ModelParts
from kvir.sglang_ext.observing import LayerMemory
from kvir.sglang_ext.requests import RequestState


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


def works_of(
    states: list[RequestState],
    compacts: list[Compact | None],
    starts: list[int],
    lens: list[int],
    phase: Phase,
) -> list[Work]:
    """The requests of a batch, in its order."""
    found: list[Work] = []
    begin = 0
    for state, compact, start, length in zip(states, compacts, starts, lens, strict=True):
        pages = np.array(state.pages, np.int64)
        found.append(Work(state, begin, begin + length, start, pages, compact, phase))
        begin += length
    return found


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


def score_inputs(
    needs: frozenset[Need], parts: ModelParts, call: LayerCall, memory: LayerMemory
) -> ScoreInputs:
    """What scores read of a layer; the rows that are held are filled in by the caller."""
    return ScoreInputs(
        k=call.k,
        v=call.v,
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
