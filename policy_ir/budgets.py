"""How many rows a selecting term may keep, per unit on average.

The tag of a budget stands among the fields of its term: `top_k: {tokens: 512, by: ...}`,
`top_k: {fraction: 0.25, by: ...}`.  A unit with fewer rows than its budget keeps them all.
"""

from __future__ import annotations

from typing import Literal

from kvir.policy_ir.base import CountOrFull, Node, NonNegative, Share, Tokens

Rounding = Literal["down", "nearest", "up"]  # nearest: halves away from zero


class BudgetBase(Node, frozen=True):
    """Base of every budget."""


class FixedTokens(BudgetBase, frozen=True, tag="tokens"):
    """The same number of rows for every unit."""

    tokens: Tokens


class Fraction(BudgetBase, frozen=True, tag="fraction"):
    """A share of the rows: of the sequence when the selection runs, or of its prompt.

    kvpress keeps int(n * (1 - ratio)), so `rounding: down` is the default.
    """

    share: Share
    of: Literal["sequence", "prompt"] = "sequence"
    rounding: Rounding = "down"


class Total(BudgetBase, frozen=True, tag="total"):
    """Rows for all units of the term's scope together, shared out by score."""

    tokens: Tokens


class PerLayer(BudgetBase, frozen=True, tag="per_layer"):
    """Rows per unit, one figure for each layer of the model that has a KV cache; `full` keeps all."""

    tokens: tuple[CountOrFull, ...]  # one per layer


class PerHead(BudgetBase, frozen=True, tag="per_head"):
    """Rows of each unit, as calibration writes them; `full` keeps all.

    HeadKV (arXiv:2410.19258) and per-head budgets for any score are such tables.
    """

    table: tuple[tuple[CountOrFull, ...], ...]  # a row per layer, a figure per KV head


class Ramp(BudgetBase, frozen=True, tag="ramp"):
    """A straight line over the layers with a given mean (PyramidKV, arXiv:2406.02069).

    With b the rows left for selection, N the candidates and L layers: low = b // ratio, high = 2 b - low; if
    high > N, then high = N and low = 2 b - high; layer l gets high - l * ((high - low) // (L - 1)).
    A sequence shorter than 2 b: every layer gets b.  `arithmetic: real` keeps the line real-valued and rounds
    each layer by itself.

    In the authors' code the line counts the rows of this term alone.  With `line: kept` it counts the rows
    of all terms: b is `mean`, short sequences get a line too, and a line that would end below the rows of the
    other terms is flat.  kvpress: `{mean: .., arithmetic: real, rounding: nearest, line: kept}`.
    """

    mean: Tokens
    ratio: Tokens = 20
    arithmetic: Literal["integer", "real"] = "integer"
    rounding: Rounding = "down"  # of each layer's figure on a real line
    line: Literal["selected", "kept"] = "selected"  # the rows that the line counts


class Preference(BudgetBase, frozen=True, tag="preference"):
    """Layer budgets from how spread out and how unsteady attention is in the prompt (CAKE, arXiv:2503.12491).

    Over the last `window` queries and all past keys: H = -sum A ln(A + epsilon), V = sum over heads and
    keys of the variance over queries; layers share `mean` times their number in proportion to
    H^entropy_power * V^variance_power.  What exceeds a layer's rows is shared equally among the others.
    CAKE writes the powers as 1/t1 and 1/t2.
    """

    mean: Tokens
    entropy_power: NonNegative = 1.0
    variance_power: NonNegative = 1.0
    window: Tokens = 32
    epsilon: NonNegative = 1e-10


Budget = FixedTokens | Fraction | Total | PerLayer | PerHead | Ramp | Preference


# ---- how a shared budget is kept fair ----------------------------------------------------------------------


class SafeguardBase(Node, frozen=True):
    """Base of every safeguard."""


class Blend(SafeguardBase, frozen=True, tag="blend"):
    """`share` of the equal budget plus (1 - share) of what the scores gave the unit, rounded to nearest.

    AdaKV's own code (arXiv:2407.11550): round(c * (1 - a) + a * b), a = 0.2.
    """

    share: Share


class Protect(SafeguardBase, frozen=True, tag="protect"):
    """The top int(share * b) rows of each unit are safe; the rest compete over the scope.

    With `counts: kept`, b and the safe rows count those of the other terms, which come first.  kvpress'
    AdaKV; not the same sets as `blend`.
    """

    share: Share


Safeguard = Blend | Protect
