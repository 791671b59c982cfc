"""Reference of `AttendDecode` and `AttendExtend`: softmax(mask(cap(scale * q @ k.T))) @ v in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from kvir.kernels.ops import Bounds, Cache


def attend_decode(
    q: Tensor,
    cache: Cache,
    pages: Tensor,
    lens: Tensor,
    bounds: Bounds,
    unit0: int,
    kv_heads: int,
    scale: float,
    logit_cap: float,
    out: Tensor,
) -> int:
    """q [B, Hq, D] -> out [B, Hq, D].  A request of length 0 gets zeros.  Returns the number of holes."""
    group = q.shape[1] // kv_heads
    holes = 0
    for b in range(q.shape[0]):
        length = int(lens[b])
        for head in range(kv_heads):
            unit, heads = unit0 + head, slice(head * group, (head + 1) * group)
            position = torch.tensor([length - 1])
            sink, recent = (int((x if x.dim() == 1 else x[b])[unit]) for x in (bounds.sink, bounds.recent))
            seen = visible(position, torch.arange(length), sink, recent)[0]
            k, v, bias, _, missing = read_rows(cache, pages[b], unit, seen.nonzero()[:, 0])
            holes += missing
            everything = torch.ones(1, k.shape[0], dtype=torch.bool)
            found = attention(q[b : b + 1, heads], k, v, everything, scale, logit_cap, bias)
            out[b, heads] = found[0].to(out.dtype)
    return holes


def attend_extend(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    cache: Cache,
    pages: Tensor,
    prefix_lens: Tensor,
    extend_lens: Tensor,
    bounds: Bounds,
    unit0: int,
    scale: float,
    logit_cap: float,
    out: Tensor,
) -> int:
    """q [T, Hq, D], k_new and v_new [T, Hkv, D] -> out [T, Hq, D].  Returns the number of holes."""
    kv_heads = k_new.shape[1]
    group = q.shape[1] // kv_heads
    holes = 0
    start = 0
    for b in range(len(extend_lens)):
        prefix, extend = int(prefix_lens[b]), int(extend_lens[b])
        tokens = slice(start, start + extend)
        start += extend
        positions = prefix + torch.arange(extend)
        for head in range(kv_heads):
            unit, heads = unit0 + head, slice(head * group, (head + 1) * group)
            sink, recent = int(bounds.sink[unit]), int(bounds.recent[unit])
            # Rows of the prefix that no query sees are never read: they may be gone.
            seen = visible(positions, torch.arange(prefix), sink, recent).any(dim=0).nonzero()[:, 0]
            k_old, v_old, _, there, missing = read_rows(cache, pages[b], unit, seen)
            holes += missing
            k = torch.cat([k_old, k_new[tokens, head].float()])
            v = torch.cat([v_old, v_new[tokens, head].float()])
            mask = visible(positions, torch.cat([there, positions]), sink, recent)
            out[tokens, heads] = attention(q[tokens, heads], k, v, mask, scale, logit_cap).to(out.dtype)
    return holes


def visible(positions: Tensor, rows: Tensor, sink: int, recent: int) -> Tensor:
    """bool [queries, rows]: is the row at position `rows[j]` visible to the query at `positions[i]`?"""
    p, j = positions[:, None], rows[None, :]
    return (j <= p) & ((j < sink) | (j > p - recent))


def read_rows(
    cache: Cache, pages: Tensor, unit: int, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Keys, values (float32, [n, D]) and biases [n] of a request's rows in one unit, the rows found, and how
    many were not.

    A row whose logical page or head-page is out of range counts as absent.
    """
    page_rows = cache.kv.shape[2]
    index = rows // page_rows
    listed = index < pages.shape[0]
    page = torch.where(listed, pages[index.clamp(max=pages.shape[0] - 1)].long(), -1)
    known = (page >= 0) & (page < cache.table.shape[0])
    head_page = torch.where(known, cache.table[page.clamp(0, cache.table.shape[0] - 1), unit].long(), -1)
    there = (head_page >= 0) & (head_page < cache.kv.shape[0])
    place = head_page[there], rows[there] % page_rows
    found = cache.kv[place[0], :, place[1]].float()
    bias = torch.zeros(len(found)) if cache.bias is None else cache.bias[place]
    return found[:, 0], found[:, 1], bias, rows[there], int((~there).sum())


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, logit_cap: float, bias: Tensor | None = None
) -> Tensor:
    """q [n, G, D], k and v [m, D] float32, mask bool [n, m], bias float32 [m] -> float32 [n, G, D].

    A query that sees nothing gets zeros.
    """
    logits = torch.einsum("ngd,md->ngm", q.float(), k) * scale
    if logit_cap > 0:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    if bias is not None:
        logits = logits + bias
    logits = logits.masked_fill(~mask[:, None, :], -torch.inf)
    blind = ~mask.any(dim=1)
    weights = torch.softmax(logits, dim=-1)
    weights[blind] = 0
    return torch.einsum("ngm,md->ngd", weights, v)
