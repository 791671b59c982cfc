"""How rows are ranked: every score, with each convention that papers leave open as a field.

Notation: a unit has N candidate rows with keys k_j and values v_j, and G query heads; d is the head size.
A is softmax(q k' / sqrt(d)), in float32 unless the term says otherwise.  Larger scores stay.  Candidates
are the rows that no other term of the rule keeps.  Scores are per KV head: `group` says how the G query
heads are joined.

Adding a score takes three places: the node here, its reference in `kernels/ref`, and an example with its
test.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from kvir.policy_ir.base import Count, Node, NonNegative, Share, Tokens, Weight
from kvir.policy_ir.pools import AveragePool, MaxPool, PoolOrNone

Reduce = Literal["mean", "max", "sum"]
Norm = Literal["l1", "l2"]
Seed = Annotated[int, Meta(ge=0, lt=1 << 32)]


class ScoreBase(Node, frozen=True):
    """Base of every score."""


# ---- what queries look at ----------------------------------------------------------------------------------


class Attention(ScoreBase, frozen=True, tag="attention"):
    """What the last `window` queries attend to (SnapKV, arXiv:2404.14469).

    The queries are the last of the prompt, or the newest when a decode rule runs.
    """

    window: Tokens = 32  # how many queries look
    rows: Literal["mean", "sum", "max", "l2", "squares"] = "mean"  # over the window; squares: sum of A^2
    variance: NonNegative = 0.0  # adds this times the variance over the window (CAKE: 200)
    softmax: Literal["all", "candidates"] = "all"  # the keys that share the mass
    causal: bool = True  # inside the window; HARD-KV's ring of queries has no order, so false
    pool: PoolOrNone = None  # smoothing along the rows
    pool_at: Literal["logits", "query_head", "kv_head"] = (
        "query_head"  # before softmax, before or after `group`
    )
    pool_over: Literal["candidates", "all"] = "candidates"
    group: Reduce = "mean"  # how the query heads of a KV head are joined
    group_at: Literal["logits", "scores"] = "scores"  # before or after softmax; R-KV: max of logits
    queries: Literal["each", "mean"] = "each"  # mean: one pseudo-query, the mean of the window


class Accumulated(ScoreBase, frozen=True, tag="accumulated"):
    """The running sum of A over all queries so far (H2O, arXiv:2306.14048).

    `normalise: visible` divides by the number of queries that could see the row, which removes the
    advantage of early rows (kvpress' ObservedAttention).
    """

    normalise: Literal["none", "visible"] = "none"
    rows: Literal["sum", "squares"] = "sum"  # squares: KV-Compress
    decay: Share = 1.0  # the sum is multiplied by it before each query is added
    group: Reduce = "mean"


class Persistent(ScoreBase, frozen=True, tag="persistent"):
    """How often a row mattered lately (Scissorhands, arXiv:2305.17118).

    The number of the last `history` queries with A >= threshold / N, divided by how often the row was seen.
    `threshold: 0` sums A itself.
    """

    history: Annotated[Tokens | None, Meta(extra={"none": "all"})] = 400
    threshold: NonNegative = 1.0
    normalise: Literal["none", "seen"] = "seen"
    group: Reduce = "mean"


class LastQuery(ScoreBase, frozen=True, tag="last_query"):
    """A of the newest query alone (TOVA, arXiv:2401.06104, with `tie: layer`)."""

    group: Reduce = "mean"


class ExpectedAttention(ScoreBase, frozen=True, tag="expected_attention"):
    """What the next `future` queries are expected to attend to, from the prompt's queries (arXiv:2510.00636).

    Mean m and covariance S of the queries before rotation, without the first `skip`; rotated by the mean
    rotation of the next `future` positions; softmax_j(m k / sqrt(d) + k' S k / (2 d)).  `value_norm`
    multiplies (score + epsilon) by |v_j|.
    """

    future: Tokens = 512
    skip: Count = 4
    covariance: bool = True
    value_norm: bool = True
    epsilon: NonNegative = 0.0
    group: Reduce = "mean"


class Noncausal(ScoreBase, frozen=True, tag="noncausal"):
    """Column sums of attention without a causal mask inside chunks (Compactor, arXiv:2507.08143).

    `value_norm` multiplies by |v_j|; pooling comes last.
    """

    chunk: Tokens = 256
    value_norm: bool = True
    pool: PoolOrNone = AveragePool(width=3)
    group: Reduce = "mean"


# ---- what keys and values look like ------------------------------------------------------------------------


class KeyNorm(ScoreBase, frozen=True, tag="key_norm"):
    """-|k_j|: keys of small norm stay (arXiv:2406.11430)."""

    norm: Norm = "l2"


class KeyDiff(ScoreBase, frozen=True, tag="key_diff"):
    """-cos(k_j, anchor): keys unlike the others stay (arXiv:2504.15364).

    `anchor: directions` is the mean of k_i / |k_i|, `keys` the mean of k_i.  The paper selects per
    128-token block: `trigger: {prefill_chunk: {tokens: 128}}`.
    """

    anchor: Literal["directions", "keys"] = "directions"
    rotated: bool = True  # keys with their rotation (RoPE), as the cache holds them


class LagKV(ScoreBase, frozen=True, tag="lagkv"):
    """How much a row spreads against the range of the next `lag` rows (LagKV, arXiv:2504.04704).

    z = (x - min) / (max - min) per channel over the next chunk; softmax over the chunk of the standard
    deviation over channels; mean of keys and values.  `rank: chunk` ranks rows inside their chunk, `all`
    among all.
    """

    lag: Tokens = 128
    parts: Literal["both", "keys", "values"] = "both"
    rank: Literal["chunk", "all"] = "chunk"


class Cur(ScoreBase, frozen=True, tag="cur"):
    """Energy of keys times energy of values, each relative to its neighbourhood (CurDKV, arXiv:2509.15038).

    |k_j|^2 / its sum over `window` rows, the same for v, joined by `combine`, then normalised to sum 1.
    """

    window: Tokens = 16
    combine: Literal["product", "mean", "keys", "values"] = "product"


class Leverage(ScoreBase, frozen=True, tag="leverage"):
    """Statistical leverage of the keys before rotation (Compactor, arXiv:2507.08143).

    X = centred keys times a Gaussian sketch to `dims`; the diagonal of X (X'X + jitter I)^-1 X'.
    """

    dims: Tokens = 48
    jitter: NonNegative = 1e-2
    seed: Seed = 0


class ValueLeverage(ScoreBase, frozen=True, tag="value_leverage"):
    """Log-determinant leverage of values, weighted by how keys point to the expected query (CAP).

    w_i = exp(sharpness * cos(k_i, m)), m the mean query rotated by the mean rotation of the next `future`
    positions; M = I + sum w_i v_i v_i'; score w_i v_i' M^-1 v_i.
    """

    sharpness: NonNegative = 5.0
    future: Tokens = 512


class Redundancy(ScoreBase, frozen=True, tag="redundancy"):
    """-(how much other keys look like this one) (R-KV, arXiv:2505.24133).

    Mean over rows of the cosine of all pairs of keys, diagonal 0; per row, among keys more alike than
    `threshold`, the one that `spare` names is not charged.  `softmax` normalises over the rows.
    """

    threshold: Annotated[float, Meta(ge=-1, le=1)] = 0.5
    spare: Literal["last", "first", "none"] = "last"
    softmax: bool = True


class Random(ScoreBase, frozen=True, tag="random"):
    """Uniform noise, the same for equal seed, layer, head and position: the control of every comparison."""

    seed: Seed = 0


# ---- scores of scores --------------------------------------------------------------------------------------


class Rkv(ScoreBase, frozen=True, tag="rkv"):
    """weight * importance - (1 - weight) * similarity (R-KV, arXiv:2505.24133).

    The authors' README has weight 0.1, their class 0.07.
    """

    weight: Share = 0.1
    importance: Score = Attention(
        window=8,
        softmax="candidates",
        pool=MaxPool(width=7),
        pool_at="kv_head",
        group="max",
        group_at="logits",
    )
    redundancy: Redundancy = Redundancy()


class LaProx(ScoreBase, frozen=True, tag="laprox"):
    """|A[window, j]|_2 * |v_j W_O|_2: the row's share of the layer's output (LaProx, arXiv:2605.07234).

    W_O is the block of the output projection of each query head.  `group_at: products` reduces complete
    products per query head, `factors` joins attention and value norms first.  `normalise: layer` divides by
    the layer's sum, which a choice across layers needs.
    """

    window: Tokens = 32
    rows: Literal["l2", "sum", "mean"] = "l2"
    pool: PoolOrNone = AveragePool(width=7)
    pool_over: Literal["candidates", "all"] = "candidates"
    group: Reduce = "mean"
    group_at: Literal["products", "factors"] = "products"
    normalise: Literal["layer", "none"] = "layer"


class CriticalKV(ScoreBase, frozen=True, tag="criticalkv"):
    """A base score for the first part of the budget, the output for the rest (arXiv:2502.03805).

    The top int(fixed * budget) rows by `base` come first; the others rank by
    (base + epsilon) * mean over the group of |v_j W_O| in `norm`.  With `counts: kept`, the budget counts the
    rows of the other terms, and they come first of all.
    """

    base: Score
    fixed: Share = 0.5
    epsilon: NonNegative = 1e-4
    norm: Norm = "l1"


class ValueWeighted(ScoreBase, frozen=True, tag="value_weighted"):
    """(base + epsilon) * |v_j|, or |v_j W_O| with `projected` (VATP, arXiv:2406.12335: l1)."""

    base: Score
    norm: Norm = "l1"
    projected: bool = False
    epsilon: NonNegative = 0.0


class Part(Node, frozen=True):
    """One summand of a `sum`: weight times the score after `scale`."""

    score: Score
    weight: Weight = 1.0
    scale: Literal["none", "z_score", "softmax", "max"] = "none"  # over the rows of a layer


class Sum(ScoreBase, frozen=True, tag="sum"):
    """A weighted sum of scores (Compactor joins leverage and non-causal attention)."""

    parts: Annotated[tuple[Part, ...], Meta(min_length=1)]


Score = (
    Attention
    | Accumulated
    | Persistent
    | LastQuery
    | ExpectedAttention
    | Noncausal
    | KeyNorm
    | KeyDiff
    | LagKV
    | Cur
    | Leverage
    | ValueLeverage
    | Redundancy
    | Random
    | Rkv
    | LaProx
    | CriticalKV
    | ValueWeighted
    | Sum
)
