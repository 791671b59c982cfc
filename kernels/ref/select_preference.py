"""Budgets of layers from entropy and variance of attention (`preference`; CAKE, arXiv:2503.12491)."""

from __future__ import annotations

from collections.abc import Sequence

from kvir.kernels.ref.score_attention import window_weights
from kvir.kernels.score_ops import ScoreInputs
from kvir.policy_ir.budgets import Preference
from kvir.policy_ir.scores import Attention


def layer_preference(spec: Preference, inputs: ScoreInputs) -> float:
    """H^entropy_power V^variance_power of one layer, over the keys before the window.

    H = -sum A ln(A + epsilon) over heads, queries and keys; V = sum over heads and keys of the variance over
    queries (of a sample).  0 if the window is all there is.
    """
    weights = window_weights(Attention(window=spec.window), inputs)
    past = weights[..., : max(0, inputs.k.shape[0] - spec.window)]
    if past.shape[-1] == 0 or past.shape[2] < 2:
        return 0.0
    entropy = float(-(past * (past + spec.epsilon).log()).sum())
    variance = float(past.var(dim=2).sum())
    return max(0.0, entropy) ** spec.entropy_power * variance**spec.variance_power


def share_out(preferences: Sequence[float], mean_rows: int, most_rows: int) -> list[int]:
    """Rows per unit of each layer, in proportion to the preferences, with a mean and a limit.

    What a layer cannot hold is shared equally among those that can.  Fractions of rows are cut, and the rows
    left over go to the largest fractions, lower layers first.  Equal shares if no layer is preferred.
    """
    layers = len(preferences)
    total = min(mean_rows, most_rows) * layers
    whole = sum(preferences)
    shares = [total * p / whole if whole > 0 else total / layers for p in preferences]
    while any(share > most_rows for share in shares):
        surplus = sum(max(0.0, share - most_rows) for share in shares)
        shares = [min(share, float(most_rows)) for share in shares]
        open_layers = [i for i, share in enumerate(shares) if share < most_rows]
        if not open_layers:
            break
        for i in open_layers:
            shares[i] += surplus / len(open_layers)
    rows = [int(share) for share in shares]
    by_fraction = sorted(range(layers), key=lambda i: (rows[i] - shares[i], i))
    for i in [i for i in by_fraction if rows[i] < most_rows][: max(0, total - sum(rows))]:
        rows[i] += 1
    return rows
