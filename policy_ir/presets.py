"""Published methods by name: `preset: snapkv` in the place of `keep`.

A preset is a short text for terms, trigger and the rest of a rule; it is replaced when a text is read, so
nothing behind the language knows presets.  Other fields that stand beside it in the rule win.  The defaults
are those of the authors' code, or of their paper where that says otherwise in the docstring; `tokens`
counts all rows of a unit.
"""

from __future__ import annotations

from typing import Any

from kvir.policy_ir.base import Count, Node, Share, Tokens
from kvir.policy_ir.budgets import Blend, FixedTokens, Ramp
from kvir.policy_ir.pools import AveragePool, MaxPool, Pool
from kvir.policy_ir.rules import Every, Over, PrefillChunk, PrefillEnd, Trigger
from kvir.policy_ir.scores import (
    Accumulated,
    Attention,
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    LagKV,
    LaProx,
    LastQuery,
    Persistent,
    Rkv,
    Score,
)
from kvir.policy_ir.terms import Recent, Sink, Term, TopK, TopP

RuleFields = dict[str, Any]


class PresetBase(Node, frozen=True):
    """Base of every preset."""

    def fields(self) -> RuleFields:
        """The fields of `Rule` that it stands for."""
        raise NotImplementedError


def _rule(*keep: Term, trigger: tuple[Trigger, ...] = (PrefillEnd(),)) -> RuleFields:
    return {"keep": keep, "trigger": trigger}


def _top(tokens: int, by: Score, **more: Any) -> TopK:
    """The rows of largest score, as many as make `tokens` with those of the other terms."""
    return TopK(budget=FixedTokens(tokens=tokens), by=by, counts="kept", **more)


class StreamingLLM(PresetBase, frozen=True, tag="streamingllm"):
    """Sinks and a window (arXiv:2309.17453), with positions as in the cache."""

    sink: Tokens = 4
    recent: Tokens = 1020

    def fields(self) -> RuleFields:
        keep = (Sink(tokens=self.sink), Recent(tokens=self.recent))
        return {"keep": keep, "positions": "cache"}


class SnapKV(PresetBase, frozen=True, tag="snapkv"):
    """What the end of the prompt attends to (arXiv:2404.14469); defaults of its LongBench runs."""

    tokens: Tokens = 1024
    window: Tokens = 32
    pool: Pool = MaxPool(width=7)

    def fields(self) -> RuleFields:
        by = Attention(window=self.window, rows="sum", pool=self.pool)
        return _rule(Recent(tokens=self.window), _top(self.tokens, by))


class PyramidKV(PresetBase, frozen=True, tag="pyramidkv"):
    """SnapKV with more rows in lower layers (arXiv:2406.02069)."""

    tokens: Tokens = 1024
    window: Tokens = 32
    ratio: Tokens = 20

    def fields(self) -> RuleFields:
        by = Attention(window=self.window, rows="sum", pool=AveragePool(width=5))
        budget = Ramp(mean=self.tokens, ratio=self.ratio)
        return _rule(Recent(tokens=self.window), TopK(budget=budget, by=by, counts="kept"))


class AdaKV(PresetBase, frozen=True, tag="adakv"):
    """SnapKV with heads of a layer competing (arXiv:2407.11550)."""

    tokens: Tokens = 1024
    window: Tokens = 32
    safeguard: Share = 0.2

    def fields(self) -> RuleFields:
        by = Attention(window=self.window, pool=MaxPool(width=7))
        top = _top(self.tokens, by, scope="layer", safeguard=Blend(share=self.safeguard))
        return _rule(Recent(tokens=self.window), top)


class H2O(PresetBase, frozen=True, tag="h2o"):
    """Heavy hitters by accumulated attention, and a window (arXiv:2306.14048), at every step."""

    tokens: Tokens = 1024
    recent: Tokens = 512

    def fields(self) -> RuleFields:
        keep = (Recent(tokens=self.recent), _top(self.tokens, Accumulated()))
        return _rule(*keep, trigger=(PrefillEnd(), Every(tokens=1)))


class Scissorhands(PresetBase, frozen=True, tag="scissorhands"):
    """Rows that mattered lately go on mattering (arXiv:2305.17118)."""

    tokens: Tokens = 1024
    recent: Tokens = 10
    history: Tokens = 400

    def fields(self) -> RuleFields:
        keep = (Recent(tokens=self.recent), _top(self.tokens, Persistent(history=self.history)))
        return _rule(*keep, trigger=(PrefillEnd(), Over(tokens=self.tokens)))


class Tova(PresetBase, frozen=True, tag="tova"):
    """What the newest query attends to, one set for all heads of a layer (arXiv:2401.06104)."""

    tokens: Tokens = 1024

    def fields(self) -> RuleFields:
        top = _top(self.tokens, LastQuery(), tie="layer")
        return _rule(top, trigger=(PrefillEnd(), Every(tokens=1)))


class RkvPreset(PresetBase, frozen=True, tag="rkv"):
    """Importance without redundancy, every 128 generated tokens (arXiv:2505.24133)."""

    tokens: Tokens = 1024
    window: Tokens = 8
    every: Tokens = 128
    weight: Share = 0.1

    def fields(self) -> RuleFields:
        importance = Attention(
            window=self.window,
            softmax="candidates",
            pool=MaxPool(width=7),
            pool_at="kv_head",
            group="max",
            group_at="logits",
        )
        top = _top(self.tokens, Rkv(weight=self.weight, importance=importance))
        return _rule(Recent(tokens=self.window), top, trigger=(Every(tokens=self.every),))


class KeyDiffPreset(PresetBase, frozen=True, tag="keydiff"):
    """Keys unlike the others, block by block (arXiv:2504.15364)."""

    tokens: Tokens = 1024
    block: Tokens = 128

    def fields(self) -> RuleFields:
        return _rule(_top(self.tokens, KeyDiff()), trigger=(PrefillChunk(tokens=self.block),))


class Knorm(PresetBase, frozen=True, tag="knorm"):
    """Keys of small norm (arXiv:2406.11430)."""

    tokens: Tokens = 1024

    def fields(self) -> RuleFields:
        return _rule(_top(self.tokens, KeyNorm()))


class ExpectedAttentionPreset(PresetBase, frozen=True, tag="expected_attention"):
    """What queries to come are expected to attend to (arXiv:2510.00636)."""

    tokens: Tokens = 1024
    sink: Tokens = 4

    def fields(self) -> RuleFields:
        return _rule(Sink(tokens=self.sink), _top(self.tokens, ExpectedAttention(skip=self.sink)))


class LagKVPreset(PresetBase, frozen=True, tag="lagkv"):
    """Rows that spread against those that follow (arXiv:2504.04704).

    LagKV keeps a share of every chunk; here the budget is for the whole prompt.
    """

    tokens: Tokens = 1024
    sink: Tokens = 4
    lag: Tokens = 128

    def fields(self) -> RuleFields:
        keep = (Sink(tokens=self.sink), Recent(tokens=self.lag), _top(self.tokens, LagKV(lag=self.lag)))
        return _rule(*keep, trigger=(PrefillEnd(over=self.sink + 2 * self.lag),))


class LaProxPreset(PresetBase, frozen=True, tag="laprox"):
    """Attention times the norm of the projected value, over the whole model (arXiv:2605.07234)."""

    tokens: Tokens = 1024
    window: Tokens = 32

    def fields(self) -> RuleFields:
        top = _top(self.tokens, LaProx(window=self.window), scope="model")
        return _rule(Recent(tokens=self.window), top)


class HardKV(PresetBase, frozen=True, tag="hardkv"):
    """Budgets that follow attention, rows by R-KV, every 128 generated tokens (arXiv:2606.28831)."""

    mass: Share = 0.9
    sink: Tokens = 1
    recent: Tokens = 32
    floor: Count = 512
    cap: Tokens = 1024
    window: Tokens = 128
    every: Tokens = 128

    def fields(self) -> RuleFields:
        seen = Attention(window=self.window, causal=False, group="max", group_at="logits")
        top = TopP(
            mass=self.mass,
            by=Rkv(weight=0.07, importance=seen),
            of=seen,
            rows="union",
            floor=self.floor,
            cap=self.cap,
        )
        keep = (Sink(tokens=self.sink), Recent(tokens=self.recent), top)
        return _rule(*keep, trigger=(Every(tokens=self.every),))


Preset = (
    StreamingLLM
    | SnapKV
    | PyramidKV
    | AdaKV
    | H2O
    | Scissorhands
    | Tova
    | RkvPreset
    | KeyDiffPreset
    | Knorm
    | ExpectedAttentionPreset
    | LagKVPreset
    | LaProxPreset
    | HardKV
)
