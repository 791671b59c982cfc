"""Scores from what queries to come are expected to ask, and the moments of queries that they rest on."""

from __future__ import annotations

import torch
from torch import Tensor

from kvir.kernels.ref.score_attention import reduce, row_positions
from kvir.kernels.ref.score_rope import mean_rotation, unrotate
from kvir.kernels.score_ops import Moments, Rope, ScoreInputs
from kvir.policy_ir.scores import ExpectedAttention, ValueLeverage

VALUE_LEVERAGE_SKIP = 4  # first queries that CAP leaves out, as attention sinks distort their mean


class QueryMoments:
    """Mean and covariance of queries before rotation, added up chunk by chunk in float64.

    `skip`: the queries at positions below it are left out.
    """

    def __init__(self, query_heads: int, head_dim: int, rope: Rope, *, skip: int = 0) -> None:
        self._rope, self._skip = rope, skip
        self._count = 0
        shape, where = (query_heads, head_dim), rope.cos.device
        self._sum = torch.zeros(shape, dtype=torch.float64, device=where)
        self._products = torch.zeros((*shape, head_dim), dtype=torch.float64, device=where)

    def update(self, q: Tensor, q_positions: Tensor) -> None:
        """q [T, Hq, D] with rotation, positions int64 [T]."""
        counted = q_positions >= self._skip
        plain = unrotate(q[counted].float(), self._rope, q_positions[counted]).double().transpose(0, 1)
        self._count += plain.shape[1]
        self._sum += plain.sum(dim=1)
        self._products += plain.transpose(1, 2) @ plain

    def moments(self) -> Moments:
        """Zeros if no query counted."""
        count = max(1, self._count)
        mean = self._sum / count
        covariance = self._products / count - mean[:, :, None] * mean[:, None, :]
        return Moments(mean.float(), covariance.float())


def expected_attention(spec: ExpectedAttention, inputs: ScoreInputs) -> Tensor:
    """float32 [Hkv, C] (arXiv:2510.00636); the softmax is over the candidates."""
    moments, turn = _expected(inputs, spec.skip, spec.future)
    rows = slice(*inputs.candidates)
    keys = inputs.k[rows].float().transpose(0, 1)  # [Hkv, C, D]
    kv_heads = keys.shape[0]
    mean = (moments.mean @ turn.T).unflatten(0, (kv_heads, -1))  # [Hkv, G, D]
    logits = mean @ keys.transpose(1, 2) * inputs.scale
    if spec.covariance:
        covariance = (turn @ moments.covariance @ turn.T).unflatten(0, (kv_heads, -1))
        # k' S k scale^2 / 2: the exponent of the mean of exp over a Gaussian
        logits = logits + ((keys[:, None] @ covariance) * keys[:, None]).sum(dim=-1) * inputs.scale**2 / 2
    scores = reduce(torch.softmax(logits, dim=-1), spec.group, dim=1)
    if spec.value_norm:
        scores = (scores + spec.epsilon) * torch.linalg.vector_norm(inputs.v[rows].float(), dim=-1).T
    return scores


def value_leverage(spec: ValueLeverage, inputs: ScoreInputs) -> Tensor:
    """float32 [Hkv, C] (CAP): w_i v_i' M^-1 v_i, M = I + sum w_i v_i v_i' over the candidates.

    The weights of a query head are relative to its largest; mean over the group.
    """
    moments, turn = _expected(inputs, VALUE_LEVERAGE_SKIP, spec.future)
    rows = slice(*inputs.candidates)
    keys = torch.nn.functional.normalize(inputs.k[rows].float().transpose(0, 1), dim=-1)
    values = inputs.v[rows].float().transpose(0, 1)[:, None]  # [Hkv, 1, C, D]
    mean = torch.nn.functional.normalize(moments.mean @ turn.T, dim=-1).unflatten(0, (keys.shape[0], -1))
    alignment = (mean @ keys.transpose(1, 2)).clamp(-1, 1)  # [Hkv, G, C]
    weights = torch.exp(spec.sharpness * (alignment - alignment.amax(dim=-1, keepdim=True)))
    weighted = values * weights[..., None]
    matrix = torch.eye(values.shape[-1], device=values.device) + weighted.transpose(-1, -2) @ values
    solved = torch.linalg.solve(matrix, values.transpose(-1, -2).expand(*matrix.shape[:2], -1, -1))
    return (weighted * solved.transpose(-1, -2)).sum(dim=-1).mean(dim=1)


def _expected(inputs: ScoreInputs, skip: int, future: int) -> tuple[Moments, Tensor]:
    """The moments, and the mean rotation of the `future` positions after the last row."""
    if skip not in inputs.moments or inputs.rope is None:
        raise ValueError(
            f"the moments of queries without the first {skip}, or the rotation tables, are missing"
        )
    after = int(row_positions(inputs)[-1]) + 1
    return inputs.moments[skip], mean_rotation(inputs.rope, after, future, inputs.k.shape[2])
