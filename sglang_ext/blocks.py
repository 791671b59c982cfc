"""Selections after every block of a prompt: attention to what is left, select, go on with the next block.

A server's chunk holds several blocks, or part of one, whatever else is in its batch; results must not depend
on that.  So a layer takes a chunk apart at the ends of blocks: queries of a block see what the blocks before
it have left, and themselves.  Only what is left at the last end is copied, into compact head-pages; what came
after it stays dense until the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvir.sglang_ext.held_rows import HeldRows


@dataclass(frozen=True)
class Block:
    """Tokens [start, stop) of a prompt; `ends`: rows are selected after them."""

    start: int
    stop: int
    ends: bool


def blocks(start: int, end: int, prompt: int, block_tokens: int) -> Iterator[Block]:
    """The blocks, and parts of them, that a chunk [start, end) of a prompt consists of."""
    while start < end:
        stop = min(end, start - start % block_tokens + block_tokens)
        yield Block(start, stop, ends=stop % block_tokens == 0 or stop == prompt)
        start = stop


def attend_block(
    q: torch.Tensor, held: HeldRows, k: torch.Tensor, v: torch.Tensor, scale: float, logit_cap: float
) -> torch.Tensor:
    """One KV head: q [T, G, D] sees every held row, and rows of its own block k, v [T, D] causally.

    Returns [T, G, D].
    """
    count, rows = q.shape[0], held.k.shape[0]
    keys, values = torch.cat([held.k[:, 0], k]), torch.cat([held.v[:, 0], v])
    mask = torch.ones(count, rows + count, dtype=torch.bool, device=q.device).tril(rows)
    if logit_cap:
        logits = torch.einsum("tgd,nd->tgn", q.float(), keys.float()) * scale
        logits = logit_cap * torch.tanh(logits / logit_cap)
        weights = logits.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        return torch.einsum("tgn,nd->tgd", weights, values.float()).to(q.dtype)
    out = scaled_dot_product_attention(
        q.transpose(0, 1), keys[None], values[None], attn_mask=mask[None], scale=scale
    )
    return out.transpose(0, 1)


def extended(held: HeldRows, k: torch.Tensor, v: torch.Tensor, start: int) -> HeldRows:
    """Held rows of one head, and after them rows k, v [T, D] of the tokens from `start` on."""
    positions = torch.arange(start, start + k.shape[0], device=k.device)
    before = held.positions
    if before is None:
        before = torch.arange(held.k.shape[0], device=k.device)
    return HeldRows(
        torch.cat([held.k, k[:, None]]), torch.cat([held.v, v[:, None]]), torch.cat([before, positions])
    )


def left(held: HeldRows, rows: torch.Tensor) -> HeldRows:
    """Those of the held rows that stay; `rows` ascend."""
    positions = rows if held.positions is None else held.positions[rows]
    return HeldRows(held.k[rows], held.v[rows], positions)
