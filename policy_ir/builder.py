"""Policies from Python: the same structs as from text, checked the same way.

policy = (
    PolicyBuilder("long-chat")
    .rule([sink(4), recent(1024)])
    .rule("all", layers="13..18", heads=[2, 5])
    .build()
)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from kvir.policy_ir.budgets import Budget, FixedTokens, Fraction
from kvir.policy_ir.nodes import (
    LANGUAGE_VERSION,
    All,
    IndexRange,
    IndexSet,
    ModelPin,
    Phase,
    Policy,
    Provenance,
    Recent,
    Rule,
    Score,
    Sink,
    Term,
    TopK,
    TopP,
    Trigger,
    Windows,
)
from kvir.policy_ir.parse import parse
from kvir.policy_ir.printer import print_policy

Indices = int | str | range | Iterable[int | str | range]


def keep_all() -> All:
    """Every row."""
    return All()


def sink(tokens: int) -> Sink:
    """The first `tokens` rows."""
    return Sink(tokens=tokens)


def recent(tokens: int) -> Recent:
    """The last `tokens` rows, the query's own included."""
    return Recent(tokens=tokens)


def top_k(
    budget: int | float | Budget,
    by: Score,
    *,
    scope: Literal["head", "layer", "model"] = "head",
    counts: Literal["selected", "kept"] = "selected",
    **more: Any,
) -> TopK:
    """The rows of largest score.

    `budget` is a whole number of tokens, a fraction, or any budget; `more` are the other fields of `TopK`.
    """
    match budget:
        case int():
            budget = FixedTokens(tokens=budget)
        case float():
            budget = Fraction(share=budget)
        case _:
            pass
    return TopK(budget=budget, by=by, scope=scope, counts=counts, **more)


def top_p(mass: float, by: Score, **more: Any) -> TopP:
    """As many rows as hold `mass`; `more` are fields of `TopP`."""
    return TopP(mass=mass, by=by, **more)


def indices(given: Indices) -> IndexSet:
    """`7`, `"0..3"`, `range(4)`, or several of them.

    Raises:
        ValueError: text that is no index range, or a Python range that is empty or has a step.
    """
    match given:
        case int():
            return (IndexRange(first=given, last=given),)
        case str():
            first, _, last = given.partition("..")
            return (IndexRange(first=int(first), last=int(last or first)),)
        case range():
            if given.step != 1 or not given:
                raise ValueError(f"{given!r} is not a run of indices")
            return (IndexRange(first=given[0], last=given[-1]),)
        case _:
            return tuple(one for part in given for one in indices(part))


class PolicyBuilder:
    """Collects the parts of one policy; every method returns the builder."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._model: ModelPin | None = None
        self._windows: Windows | None = None
        self._rules: list[Rule] = []
        self._provenance: Provenance | None = None

    def model(
        self,
        *,
        arch: str | None = None,
        layers: int | None = None,
        kv_heads: int | None = None,
        fingerprint: str | None = None,
    ) -> PolicyBuilder:
        """What the model must be."""
        self._model = ModelPin(arch=arch, layers=layers, kv_heads=kv_heads, fingerprint=fingerprint)
        return self

    def windows(self, table: Sequence[Sequence[int | None]], *, sink: int = 0) -> PolicyBuilder:
        """A window per (layer, KV head); None keeps all rows."""
        self._windows = Windows(table=tuple(tuple(row) for row in table), sink=sink)
        return self

    def rule(
        self,
        keep: Term | str | Iterable[Term],
        *,
        layers: Indices | None = None,
        heads: Indices | None = None,
        phase: Phase | None = None,
        trigger: Trigger | Iterable[Trigger] = (),
        **more: Any,
    ) -> PolicyBuilder:
        """One more rule, after those given before.

        `keep` is terms or the text `"all"`; `more` are the other fields of `Rule`.
        """
        match keep:
            case "all":
                terms: tuple[Any, ...] = (All(),)
            case str():
                raise ValueError(f'keep is "all" or terms, not {keep!r}')
            case msgspec.Struct():
                terms = (keep,)
            case _:
                terms = tuple(keep)
        chosen = {name: indices(v) for name, v in (("layers", layers), ("heads", heads)) if v is not None}
        when = (trigger,) if isinstance(trigger, msgspec.Struct) else tuple(trigger)
        self._rules.append(Rule(keep=terms, phase=phase, trigger=when, **chosen, **more))
        return self

    def provenance(self, tool: str, version: str, **more: Any) -> PolicyBuilder:
        """How the policy came to be; `more` are the other fields of `Provenance`."""
        self._provenance = Provenance(tool=tool, version=version, **more)
        return self

    def build(self) -> Policy:
        """The policy.

        Raises:
            PolicyError: a part that text could not say, shown in the canonical text of the policy.
        """
        policy = Policy(
            kvir=LANGUAGE_VERSION,
            name=self._name,
            model=self._model,
            windows=self._windows,
            rules=tuple(self._rules),
            provenance=self._provenance,
        )
        return parse(print_policy(policy), self._name)
