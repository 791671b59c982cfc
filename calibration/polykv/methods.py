"""The methods that compete for a layer or KV head: each a rule of the language whose budget is left open.

A method keeps the first rows, the last rows, and of the others those of largest score, as many as its budget
says; `streaming` has no score and keeps a longer window instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from kvir.calibration.harness import CalibrationError
from kvir.policy_ir import load
from kvir.policy_ir.budgets import FixedTokens, Fraction, Protect
from kvir.policy_ir.nodes import Recent, Rule, Sink, Term, TopK
from kvir.policy_ir.pools import AveragePool
from kvir.policy_ir.rules import PrefillEnd
from kvir.policy_ir.scores import (
    Accumulated,
    Attention,
    CriticalKV,
    Cur,
    ExpectedAttention,
    KeyDiff,
    KeyNorm,
    LagKV,
    LaProx,
    LastQuery,
    Leverage,
    Persistent,
    Random,
    Rkv,
    Score,
    ValueWeighted,
)

_SNAPKV = Attention(window=32, pool=AveragePool(width=7))
STREAMING = "streaming"


def _top_k(by: Score) -> TopK:
    return TopK(budget=FixedTokens(tokens=1), by=by, counts="kept")


# name -> the term by score; the budgets are placeholders
TERMS: dict[str, TopK | None] = {
    STREAMING: None,
    "snapkv": _top_k(_SNAPKV),
    "h2o": _top_k(Accumulated(normalise="visible")),
    "scissorhands": _top_k(Persistent()),
    "tova": structs.replace(_top_k(LastQuery()), tie="layer"),
    "keydiff": _top_k(KeyDiff()),
    "knorm": _top_k(KeyNorm()),
    "expected_attention": _top_k(ExpectedAttention()),
    "lagkv": _top_k(LagKV()),
    "laprox": structs.replace(_top_k(LaProx()), scope="layer"),
    "adakv": structs.replace(_top_k(_SNAPKV), scope="layer", safeguard=Protect(share=0.2)),
    "criticalkv": _top_k(CriticalKV(base=_SNAPKV)),
    "vatp": _top_k(ValueWeighted(base=Accumulated())),
    "cur": _top_k(Cur()),
    "leverage": _top_k(Leverage()),
    "rkv": _top_k(Rkv()),
    "random": _top_k(Random()),
}
DEFAULT = (STREAMING, "snapkv", "h2o", "tova", "keydiff", "expected_attention", "lagkv", "laprox")


@dataclass(frozen=True)
class Method:
    """Sinks and recent rows are inside every budget.  `term` None: a window, no score."""

    name: str
    sink_tokens: int
    recent_tokens: int
    term: TopK | None

    @property
    def inside_rows(self) -> int:
        """Rows that stay whatever the budget is."""
        return self.sink_tokens + self.recent_tokens

    def rule(self, rows: int, context_tokens: int) -> Rule:
        """The rule that keeps `rows` of a prompt of `context_tokens`, and as large a share of others.

        A window has no shares: it keeps `rows` of every prompt, and slides on.
        """
        sink = (Sink(tokens=self.sink_tokens),) if self.sink_tokens else ()
        if self.term is None:
            return Rule(
                keep=(*sink, Recent(tokens=max(1, rows - self.sink_tokens))), phase="decode", trigger=()
            )
        recent = (Recent(tokens=self.recent_tokens),) if self.recent_tokens else ()
        budget = Fraction(share=share_of(rows, context_tokens), rounding="nearest")
        keep: tuple[Term, ...] = (*sink, *recent, structs.replace(self.term, budget=budget))
        return Rule(keep=keep, trigger=(PrefillEnd(),))

    def alone(self) -> Method:
        """The same for one KV head by itself: nobody to share a budget or a choice with."""
        if self.term is None:
            return self
        term = structs.replace(self.term, scope="head", tie=None, safeguard=None, floor=0, cap=None)
        return replace(self, term=term)


def share_of(rows: int, context_tokens: int) -> float:
    """The share that means `rows` of a prompt of that length when it is rounded to nearest."""
    return max(1, round(rows / context_tokens * 10_000)) / 10_000


def find(names: Sequence[str], *, sink_tokens: int, recent_tokens: int, per_head: bool) -> tuple[Method, ...]:
    """The methods of a list of names and `.ir` files, each once, in that order.

    Raises:
        CalibrationError: a name that is none, or a file whose first rule is no method.
        PolicyError, OSError: a file that is no policy.
    """
    methods = [_method(name, sink_tokens, recent_tokens) for name in names]
    if per_head:
        methods = [method.alone() for method in methods]
    kept: list[Method] = []
    for method in methods:
        if not any(replace(other, name=method.name) == method for other in kept):
            kept.append(method)
    if not kept:
        raise CalibrationError("--methods names none")
    if len({method.name for method in kept}) < len(kept):
        raise CalibrationError("two methods have the same name")
    return tuple(kept)


def _method(name: str, sink_tokens: int, recent_tokens: int) -> Method:
    if name.endswith(".ir"):
        return _from_file(Path(name))
    if name not in TERMS:
        raise CalibrationError(f"unknown method `{name}`; known: {', '.join(TERMS)}, or a file ending in .ir")
    term = TERMS[name]
    return Method(name, sink_tokens, recent_tokens if term is not None else 0, term)


def _from_file(path: Path) -> Method:
    rules = load(path).rules
    terms = rules[0].keep if rules else ()
    by_score = [term for term in terms if isinstance(term, TopK)]
    others = [term for term in terms if not isinstance(term, TopK | Sink | Recent)]
    if len(by_score) != 1 or others or by_score[0].scope == "model" or by_score[0].tie == "model":
        raise CalibrationError(
            f"{path}: a method is a first rule of `sink`, `recent` and one `top_k` that looks at one layer"
        )
    return Method(
        path.stem, _most(terms, Sink), _most(terms, Recent), structs.replace(by_score[0], counts="kept")
    )


def _most(terms: Iterable[Term], kind: type[Sink] | type[Recent]) -> int:
    return max((term.tokens for term in terms if isinstance(term, kind)), default=0)
