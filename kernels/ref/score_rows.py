"""Scores from what keys and values look like.

k and v are [n, Hkv, D], results float32 [Hkv, C].  Sums and means over rows are over every row that the unit
holds, but where it says candidates.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from kvir.kernels.ref.score_attention import row_positions
from kvir.kernels.ref.score_rope import unrotate
from kvir.kernels.ref.score_values import ORDER
from kvir.kernels.score_ops import ScoreInputs
from kvir.policy_ir.scores import Cur, KeyDiff, KeyNorm, LagKV, Leverage, Random, Redundancy

ROW_BLOCK = 256  # bounds the memory of pairs of rows


def key_norm(spec: KeyNorm, inputs: ScoreInputs) -> Tensor:
    """-|k_j| (arXiv:2406.11430)."""
    keys = inputs.k[slice(*inputs.candidates)].float()
    return -torch.linalg.vector_norm(keys, ORDER[spec.norm], dim=-1).T


def key_diff(spec: KeyDiff, inputs: ScoreInputs) -> Tensor:
    """-cos(k_j, anchor) (arXiv:2504.15364)."""
    keys = inputs.k.float() if spec.rotated else plain_keys(inputs)
    directions = keys if spec.anchor == "keys" else torch.nn.functional.normalize(keys, dim=-1)
    anchor = directions.mean(dim=0, keepdim=True)
    cosines = torch.nn.functional.cosine_similarity(keys, anchor, dim=-1)
    return -cosines[slice(*inputs.candidates)].T


def lagkv(spec: LagKV, inputs: ScoreInputs) -> Tensor:
    """Spread against the range of the next chunk (LagKV, arXiv:2504.04704).

    Chunks of `lag` rows start at the first candidate and run on over rows that are none.  Rows without a
    whole chunk after theirs have nothing to be measured against: they score 1, the most there is.
    """
    start, stop = inputs.candidates
    chunks = (inputs.k.shape[0] - start) // spec.lag
    scores = torch.ones(inputs.k.shape[1], inputs.k.shape[0] - start, device=inputs.k.device)
    if chunks >= 2:
        parts = {"both": (inputs.k, inputs.v), "keys": (inputs.k,), "values": (inputs.v,)}[spec.parts]
        spreads = [_spread(x[start:].float(), chunks, spec.lag) for x in parts]
        spread = torch.stack(spreads).mean(dim=0)  # [Hkv, chunks - 1, lag]
        if spec.rank == "chunk":
            # place 0 .. lag - 1 in its chunk, from the smallest; among equals the older is placed higher
            order = spread.flip(-1).argsort(dim=-1, stable=True).argsort(dim=-1).flip(-1)
            spread = order.float() / spec.lag
        scores[:, : (chunks - 1) * spec.lag] = spread.flatten(1)
    return scores[:, : stop - start]


def cur(spec: Cur, inputs: ScoreInputs) -> Tensor:
    """Energy relative to the aligned window of `window` rows that a row is in (CurDKV, arXiv:2509.15038)."""
    keys, values = (_local_energy(x.float(), spec.window) for x in (inputs.k, inputs.v))
    match spec.combine:
        case "product":
            scores = keys * values
        case "mean":
            scores = (keys + values) / 2
        case "keys":
            scores = keys
        case "values":
            scores = values
        case _:
            assert_never(spec.combine)
    scores = scores / scores.sum(dim=-1, keepdim=True)
    return scores[:, slice(*inputs.candidates)]


def leverage(spec: Leverage, inputs: ScoreInputs) -> Tensor:
    """diag(X (X'X + jitter I)^-1 X') of the candidates' keys before rotation (Compactor, arXiv:2507.08143).

    X is centred over the candidates and sketched; the sketch is the same for all layers and heads, its
    entries have variance 1 / dims.
    """
    keys = plain_keys(inputs)[slice(*inputs.candidates)].transpose(0, 1)  # [Hkv, C, D]
    generator = torch.Generator().manual_seed(spec.seed)
    sketch = torch.randn(keys.shape[-1], spec.dims, generator=generator).to(keys.device) / spec.dims**0.5
    x = (keys - keys.mean(dim=1, keepdim=True)) @ sketch
    inner = x.transpose(1, 2) @ x + spec.jitter * torch.eye(spec.dims, device=keys.device)
    return (x * torch.linalg.solve(inner, x.transpose(1, 2)).transpose(1, 2)).sum(dim=-1)


def redundancy(spec: Redundancy, inputs: ScoreInputs) -> Tensor:
    """-(mean over rows of the cosine with this one) (R-KV, arXiv:2505.24133), in blocks of rows."""
    directions = inputs.k.float().transpose(0, 1)  # [Hkv, n, D]
    directions = directions / (torch.linalg.vector_norm(directions, dim=-1, keepdim=True) + 1e-8)
    n, where = directions.shape[1], directions.device
    total = torch.zeros(directions.shape[0], n, device=where)
    columns = torch.arange(n, device=where)
    for start in range(0, n, ROW_BLOCK):
        rows = columns[start : start + ROW_BLOCK]
        cosines = directions[:, rows] @ directions.transpose(1, 2)  # [Hkv, block, n]
        cosines[:, rows - start, rows] = 0
        alike = cosines > spec.threshold
        match spec.spare:
            case "last":
                spared = torch.where(alike, columns, -1).amax(dim=-1)
            case "first":
                spared = torch.where(alike, columns, n).amin(dim=-1)
            case "none":
                spared = torch.full(alike.shape[:2], -1, device=where)
            case _:
                assert_never(spec.spare)
        cosines.masked_fill_(columns == spared[..., None], 0)
        total += cosines.sum(dim=1)
    alikeness = total / n
    if spec.softmax:
        alikeness = torch.softmax(alikeness, dim=-1)
    return -alikeness[:, slice(*inputs.candidates)]


def random(spec: Random, inputs: ScoreInputs) -> Tensor:
    """Uniform in [0, 1): a hash of (seed, layer, head, position), so it depends on nothing else."""
    heads = inputs.first_head + torch.arange(inputs.k.shape[1], device=inputs.k.device)[:, None]
    positions = row_positions(inputs)[slice(*inputs.candidates)][None, :]
    state = _mix(torch.tensor(spec.seed))
    for part in (torch.tensor(inputs.layer), heads, positions):
        state = _mix(state + part)
    return (state >> 8 & 0xFFFFFF).float() / (1 << 24)


# ---- parts -------------------------------------------------------------------------------------------------


def plain_keys(inputs: ScoreInputs) -> Tensor:
    """Keys before rotation, float32 [n, Hkv, D].  Raises ValueError without rotation tables."""
    if inputs.rope is None:
        raise ValueError("the rotation tables are missing")
    return unrotate(inputs.k.float(), inputs.rope, row_positions(inputs))


def _spread(x: Tensor, chunks: int, lag: int) -> Tensor:
    """x [rows, Hkv, D] -> [Hkv, chunks - 1, lag]: softmax over a chunk of the spread over channels."""
    blocks = x[: chunks * lag].view(chunks, lag, *x.shape[1:]).permute(2, 0, 1, 3)  # [Hkv, chunks, lag, D]
    reference, measured = blocks[:, 1:], blocks[:, :-1]
    low, high = reference.amin(dim=2, keepdim=True), reference.amax(dim=2, keepdim=True)
    width = high - low
    # a channel that does not vary says nothing
    z = torch.where(width > 0, (measured - low) / width.where(width > 0, 1), 0)
    return torch.softmax(z.std(dim=-1), dim=-1)  # of a sample: divided by D - 1


def _local_energy(x: Tensor, window: int) -> Tensor:
    """[n, Hkv, D] -> [Hkv, n]: |x_j|^2 over the sum in its window; the last window may be short."""
    energy = x.square().sum(dim=-1).T
    n = energy.shape[1]
    padded = torch.nn.functional.pad(energy, (0, -n % window)).unflatten(1, (-1, window))
    return (padded / padded.sum(dim=-1, keepdim=True)).flatten(1)[:, :n]


def _mix(x: Tensor) -> Tensor:
    """splitmix64 in wrapping int64, with logical shifts."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)
