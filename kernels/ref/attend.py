"""Reference of `AttendDecode` and `AttendExtend`: softmax(mask(cap(scale * q @ k.T))) @ v in float32."""

from __future__ import annotations

from typing import NamedTuple

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
            rows = read_rows(cache, pages[b], unit, seen.nonzero()[:, 0])
            holes += rows.missing
            everything = torch.ones(1, rows.k.shape[0], dtype=torch.bool)
            query = q[b : b + 1, heads]
            found = attention(query, rows.k, rows.v, everything, scale, logit_cap, rows.bias)[0]
            out[b, heads] = found.to(out.dtype)
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
            old = read_rows(cache, pages[b], unit, seen)
            holes += old.missing
            k = torch.cat([old.k, k_new[tokens, head].float()])
            v = torch.cat([old.v, v_new[tokens, head].float()])
            mask = visible(positions, torch.cat([old.there, positions]), sink, recent)
            out[tokens, heads] = attention(q[tokens, heads], k, v, mask, scale, logit_cap).to(out.dtype)
    return holes


def visible(positions: Tensor, rows: Tensor, sink: int, recent: int) -> Tensor:
    """bool [queries, rows]: is the row at position `rows[j]` visible to the query at `positions[i]`?"""
    p, j = positions[:, None], rows[None, :]
    return (j <= p) & ((j < sink) | (j > p - recent))


class FoundRows(NamedTuple):
    """Rows of one request in one unit."""

    k: Tensor  # float32 [n, D]
    v: Tensor
    there: Tensor  # int64 [n], the rows that were found
    bias: Tensor | None  # float32 [n]
    missing: int


def read_rows(cache: Cache, pages: Tensor, unit: int, rows: Tensor) -> FoundRows:
    """What `rows` of a request are in one unit.

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
    bias = None if cache.bias is None else cache.bias[place]
    return FoundRows(found[:, 0], found[:, 1], rows[there], bias, int((~there).sum()))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    logit_cap: float,
    bias: Tensor | None = None,
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
