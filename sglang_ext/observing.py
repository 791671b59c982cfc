"""What scores must see of a sequence: its last queries, and sums over all queries of the prompt.

Kept per request and layer, across chunks and steps; a last chunk may be one token long.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from kvir.kernels.ref.score_expected import QueryMoments
from kvir.kernels.ref.score_needs import needs, running, skips, window
from kvir.kernels.score_ops import Moments, Need, Rope, Running, RunningScore, SumKernels, Sums
from kvir.policy_ir.scores import Noncausal, Score


@dataclass(frozen=True)
class Wants:
    """What the scores of one layer ask for."""

    queries: int  # the last ones, kept as they are
    running: tuple[RunningScore, ...]
    skips: tuple[int, ...]  # moments of queries, by the number of first ones left out
    needs: frozenset[Need]

    @staticmethod
    def of(scores: Iterable[Score], *, at_least: int = 0) -> Wants:
        """`at_least`: queries that are wanted besides."""
        scores = list(scores)
        return Wants(
            queries=max([at_least, *map(window, scores)]),
            running=tuple(dict.fromkeys(r for score in scores for r in running(score))),
            skips=tuple(dict.fromkeys(s for score in scores for s in skips(score))),
            needs=frozenset(need for score in scores for need in needs(score)),
        )


class LayerMemory:
    """One layer of one request: fed chunk by chunk and step by step, asked when rows are selected."""

    def __init__(
        self,
        wants: Wants,
        prompt_tokens: int,
        scale: float,
        logit_cap: float,
        rope: Rope | None,
        sums: SumKernels,
    ) -> None:
        self._wants, self._prompt = wants, prompt_tokens
        self._scale, self._cap, self._rope = scale, logit_cap, rope
        self._kernels = sums
        self.queries: torch.Tensor | None = None
        self._running: dict[RunningScore, Running] = {}
        self._moments: dict[int, QueryMoments] = {}

    def remember(self, q: torch.Tensor) -> None:
        """The next queries [T, Hq, D]: the last of them are kept."""
        count = self._wants.queries
        last = q[max(0, q.shape[0] - count) :]
        if self.queries is not None and last.shape[0] < count:
            last = torch.cat([self.queries, last])[-count:]
        self.queries = last.clone()

    def add_up(self, q: torch.Tensor, k: torch.Tensor | None, start: int) -> None:
        """q [T, Hq, D] of the chunk that begins at token `start`; k [start + T, Hkv, D] if sums are asked."""
        wants = self._wants
        positions = torch.arange(start, start + q.shape[0], device=q.device)
        if wants.running:
            assert k is not None
            lse = torch.empty(0)
            if any(not isinstance(spec, Noncausal) for spec in wants.running):
                lse = self._kernels.log_sum_exp(q, k, positions, self._scale, logit_cap=self._cap)
            for spec in wants.running:
                if spec not in self._running:
                    self._running[spec] = self._kernels.running_of(
                        spec,
                        q.shape[1],
                        self._scale,
                        tokens=self._prompt,
                        logit_cap=self._cap,
                        device=q.device,
                    )
                self._running[spec].update(q, lse, k, positions)
        for skip in wants.skips:
            assert self._rope is not None
            if skip not in self._moments:
                self._moments[skip] = QueryMoments(q.shape[1], q.shape[2], self._rope, skip=skip)
            self._moments[skip].update(q, positions)

    def forget_sums(self) -> None:
        """The prompt is done."""
        self._running, self._moments = {}, {}

    def sums(self) -> dict[RunningScore, Sums]:
        return {spec: running.sums() for spec, running in self._running.items()}

    def moments(self) -> dict[int, Moments]:
        return {skip: moments.moments() for skip, moments in self._moments.items()}
