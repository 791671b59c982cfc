"""Attention of a chunk: a block of queries of one KV head goes over the prefix that it sees, then over the
chunk's own rows.

The queries of a block are (token, query head of the group) pairs, so that heads that share K and V read them
once.  The grid is fixed by the number of tokens and requests; each program finds its request by itself.
"""

# Triton's ranges and blocks exist for its compiler alone.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton.language as tl

from kvir.kernels.triton.rows import fold_in, head_pages, logits_in_bits, places, visible_rows
from kvir.kernels.triton.settings import LN_2, kernel


@kernel("batch", "unit0", "head_page_count", "logical_pages", "max_pages", "table_stride", "pages_stride")
def extend_blocks(
    q,  # [T, Hq, D]
    k_new,  # [T, Hkv, D]
    v_new,
    kv,  # [N, 2, P, D]
    table,  # int32 [L, U]
    pages,  # int32 [B, max_pages]
    prefix_lens,  # int32 [B]
    extend_lens,
    sinks,  # int32 [U]
    recents,
    out,  # [T, Hq, D]
    lse,  # float32 [T, Hq], natural, or anything
    holes,  # int32 [1], added to
    batch,
    unit0,
    head_page_count,
    logical_pages,
    max_pages,
    table_stride,
    pages_stride,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    out_stride,
    out_head_stride,
    scale,
    logit_cap,
    BATCH: tl.constexpr,  # padded
    G: tl.constexpr,
    QUERIES: tl.constexpr,  # of a block, padded
    TOKENS: tl.constexpr,  # of a block: QUERIES // G
    D: tl.constexpr,
    DIM: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    CAP: tl.constexpr,
    LSE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    head = tl.program_id(0)
    block = tl.program_id(1)
    every = tl.arange(0, BATCH)
    chunks = tl.load(extend_lens + every, mask=every < batch, other=0)
    blocks = (chunks + TOKENS - 1) // TOKENS
    ends = tl.cumsum(blocks, 0)
    b = tl.sum((ends <= block).to(tl.int32))
    if b >= batch:
        return
    earlier = every < b
    token0 = tl.sum(tl.where(earlier, chunks, 0))  # of the request
    first = (block - tl.sum(tl.where(earlier, blocks, 0))) * TOKENS  # token of the chunk
    extend = tl.load(extend_lens + b)
    prefix = tl.load(prefix_lens + b)
    unit = unit0 + head
    sink = tl.load(sinks + unit)
    recent = tl.load(recents + unit)

    lane = tl.arange(0, QUERIES)
    d = tl.arange(0, DIM)
    token = first + lane // G
    real = (token < extend) & (lane < TOKENS * G)
    position = prefix + token
    q_head = head * G + lane % G
    mine = real[:, None] & (d < D)[None, :]
    at = (token0 + token).to(tl.int64)
    of_q = q + at[:, None] * q_stride + q_head[:, None] * q_head_stride + d[None, :]
    query = tl.load(of_q, mask=mine, other=0.0)
    m = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM], tl.float32)

    # the prefix: the first query of a block sees all that later ones see
    count, hidden = visible_rows(prefix + first, prefix, sink, recent)
    missing = tl.zeros([ROWS], tl.int32)
    own_pages = pages + b.to(tl.int64) * pages_stride
    for start in tl.range(0, count, ROWS):
        number = start + tl.arange(0, ROWS)
        wanted = number < count
        j = places(number, sink, hidden)
        page, there = head_pages(
            j, wanted, own_pages, max_pages, table + unit, logical_pages, table_stride, head_page_count, P
        )
        missing += (wanted & ~there).to(tl.int32)
        row = page.to(tl.int64) * (2 * P * D) + (j % P) * D
        of_k = kv + row[None, :] + d[:, None]
        k = tl.load(of_k, mask=there[None, :] & (d < D)[:, None], other=0.0)
        x = logits_in_bits(query, k, scale, logit_cap, CAP, WIDEN)
        seen = there[None, :] & ((j < sink)[None, :] | (j[None, :] > position[:, None] - recent))
        x = tl.where(seen, x, -float("inf"))
        of_v = kv + P * D + row[:, None] + d[None, :]
        v = tl.load(of_v, mask=there[:, None] & (d < D)[None, :], other=0.0)
        m, total, acc = fold_in(m, total, acc, x, v, WIDEN)
    lost = tl.sum(missing)
    if (first == 0) & (lost > 0):  # once for the request
        tl.atomic_add(holes, lost)

    # the chunk: positions count from its start
    fresh_sink = tl.maximum(sink - prefix, 0)
    stop = tl.minimum(first + TOKENS, extend)
    count, hidden = visible_rows(first, stop, fresh_sink, recent)
    for start in tl.range(0, count, ROWS):
        number = start + tl.arange(0, ROWS)
        wanted = number < count
        j = places(number, fresh_sink, hidden)
        row = (token0 + j).to(tl.int64)
        of_k = k_new + row[None, :] * k_stride + head * k_head_stride + d[:, None]
        k = tl.load(of_k, mask=wanted[None, :] & (d < D)[:, None], other=0.0)
        x = logits_in_bits(query, k, scale, logit_cap, CAP, WIDEN)
        seen = (j < fresh_sink)[None, :] | (j[None, :] > token[:, None] - recent)
        seen &= wanted[None, :] & (j[None, :] <= token[:, None])
        x = tl.where(seen, x, -float("inf"))
        of_v = v_new + row[:, None] * v_stride + head * v_head_stride + d[None, :]
        v = tl.load(of_v, mask=wanted[:, None] & (d < D)[None, :], other=0.0)
        m, total, acc = fold_in(m, total, acc, x, v, WIDEN)

    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    of_out = out + at[:, None] * out_stride + q_head[:, None] * out_head_stride + d[None, :]
    tl.store(of_out, acc.to(out.dtype.element_ty), mask=mine)
    if LSE:
        heads = tl.num_programs(0) * G
        tl.store(lse + at * heads + q_head, (m + tl.log2(total)) * LN_2, mask=real)
