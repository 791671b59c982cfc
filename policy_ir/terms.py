"""What a unit keeps: the terms of `keep`, whose union stays."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvir.policy_ir.base import INLINE, Count, Node, Share, Tokens
from kvir.policy_ir.budgets import Budget, Safeguard
from kvir.policy_ir.scores import Reduce, Score


class TermBase(Node, frozen=True):
    """Base of every term."""


# ---- by position -------------------------------------------------------------------------------------------


class All(TermBase, frozen=True, tag="all"):
    """Every row: the unit behaves like stock attention."""


class Sink(TermBase, frozen=True, tag="sink"):
    """The first `tokens` rows of the sequence (StreamingLLM's attention sinks)."""

    tokens: Tokens


class Recent(TermBase, frozen=True, tag="recent"):
    """The last `tokens` rows, the query's own included: query q sees keys q - tokens + 1 .. q."""

    tokens: Tokens


# ---- by score ----------------------------------------------------------------------------------------------


class TopK(TermBase, frozen=True, tag="top_k"):
    """The rows of largest score, as many as the budget says."""

    budget: Annotated[Budget, Meta(extra=INLINE)]
    by: Score
    # units that compete for one common budget, the budget of each times their number
    scope: Literal["head", "layer", "model"] = "head"
    # selected: rows of this term, beside those of the other terms; kept: rows of all terms together
    counts: Literal["selected", "kept"] = "selected"
    floor: Count = 0  # least rows per unit when units compete
    cap: Tokens | None = None  # most rows per unit when units compete
    safeguard: Safeguard | None = None  # how much of an equal share each unit keeps when units compete
    tie: Literal["layer", "model"] | None = None  # units that keep the same rows
    tie_reduce: Reduce = "mean"  # the common score of tied units
    block: Tokens = 1  # rows are taken in aligned blocks of this many, by mean score (ChunkKV: 20)
    on_equal: Literal["older", "newer"] = "older"  # who stays when scores are equal
    precision: Literal["float32", "model"] = "float32"  # of scores and softmax


class TopP(TermBase, frozen=True, tag="top_p"):
    """As many rows as it takes to hold `mass` of a distribution (nucleus), within floor and cap.

    The count is taken from `of`, the rows by `by`: with `of: attention` any score gets budgets that follow
    the entropy of true attention (HARD-KV, arXiv:2606.28831).  Past the cap, the lowest scores go.
    """

    mass: Share
    by: Score
    of: Score | None = None  # left out: `by` itself
    rows: Literal["reduced", "union"] = "reduced"  # nucleus of the reduced score, or union of one per query
    floor: Count = 0
    cap: Tokens | None = None
    on_equal: Literal["older", "newer"] = "older"
    precision: Literal["float32", "model"] = "float32"


StaticTerm = All | Sink | Recent
Term = All | Sink | Recent | TopK | TopP
