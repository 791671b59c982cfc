"""Sums of attention over queries, per query head and row, without the matrix of all queries and rows.

Two passes: the log-sum-exp of each query (which attention may have given already), then, for a block of rows,
the weights of all queries.  A row belongs to one program, so there is nothing to add up between programs and
the same input gives the same bits.
"""

# Triton's ranges and blocks exist for its compiler alone.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton.language as tl

from kvir.kernels.triton.rows import logits_in_bits
from kvir.kernels.triton.settings import LN_2, LOG2_E, kernel

SUM = tl.constexpr(0)
SQUARES = tl.constexpr(1)
LARGEST = tl.constexpr(2)
COUNT = tl.constexpr(3)  # queries to which a row matters


@kernel("tokens", "rows", "part_rows")
def lse_parts(
    q,  # [T, Hq, D]
    k,  # [n, Hkv, D]
    q_positions,  # int64 [T]
    k_positions,  # int64 [n]
    part_max,  # float32 [parts, T, Hq], in bits
    part_sum,
    tokens,
    rows,
    part_rows,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    scale,
    logit_cap,
    G: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program per KV head, block of (token, query head) pairs and part of the rows."""
    head = tl.program_id(0)
    part = tl.program_id(2)
    heads = tl.num_programs(0) * G
    lane = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    token = lane // G
    q_head = head * G + lane % G
    real = token < tokens
    d = tl.arange(0, DIM)
    of_q = q + token.to(tl.int64)[:, None] * q_stride + q_head[:, None] * q_head_stride + d[None, :]
    query = tl.load(of_q, mask=real[:, None] & (d < D)[None, :], other=0.0)
    position = tl.load(q_positions + token, mask=real, other=-1)
    m = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    first = part * part_rows
    last = tl.minimum(first + part_rows, rows)
    for start in tl.range(first, last, ROWS):
        j = start + tl.arange(0, ROWS)
        wanted = j < last
        of_k = k + j.to(tl.int64)[None, :] * k_stride + head * k_head_stride + d[:, None]
        keys = tl.load(of_k, mask=wanted[None, :] & (d < D)[:, None], other=0.0)
        x = logits_in_bits(query, keys, scale, logit_cap, CAP, WIDEN)
        seen = wanted[None, :]
        if CAUSAL:
            seen &= tl.load(k_positions + j, mask=wanted, other=0)[None, :] <= position[:, None]
        x = tl.where(seen, x, -float("inf"))
        highest = tl.maximum(m, tl.max(x, 1))
        base = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp2(m - base) + tl.sum(tl.exp2(x - base[:, None]), 1)
        m = highest
    at = (part * tokens + token) * heads + q_head
    tl.store(part_max + at, m, mask=real)
    tl.store(part_sum + at, total, mask=real)


@kernel("parts", "count")
def lse_merge(part_max, part_sum, lse, parts, count, BLOCK: tl.constexpr):
    """float32 [parts, count] -> natural log-sum-exp [count]; -inf for a query that sees no row."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = i < count
    m = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.range(0, parts):
        x = tl.load(part_max + part * count + i, mask=real, other=0.0)
        sums = tl.load(part_sum + part * count + i, mask=real, other=0.0)
        highest = tl.maximum(m, x)
        base = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp2(m - base) + sums * tl.exp2(x - base)
        m = highest
    tl.store(lse + i, (m + tl.log2(total)) * LN_2, mask=real)


@kernel("tokens", "rows")
def column_sums(
    q,  # [T, Hq, D]
    k,  # [n, Hkv, D]
    lse,  # float32 [T, Hq], natural
    q_positions,  # int64 [T], ascending
    k_positions,  # int64 [n], ascending
    values,  # float32 [Hq, n], read and written
    seen_out,  # int64 [n], added to, or anything
    tokens,
    rows,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    scale,
    logit_cap,
    log2_decay,  # of one query
    threshold,
    G: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    HOW: tl.constexpr,
    SEEN: tl.constexpr,
    CAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program per query head and block of rows.

    `values` becomes decay ** T * values + sum over queries t of decay ** (T - 1 - t) * f(weight), f by HOW.
    """
    q_head = tl.program_id(0)
    head = q_head // G
    j = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    wanted = j < rows
    d = tl.arange(0, DIM)
    of_k = k + j.to(tl.int64)[None, :] * k_stride + head * k_head_stride + d[:, None]
    keys = tl.load(of_k, mask=wanted[None, :] & (d < D)[:, None], other=0.0)
    row_position = tl.load(k_positions + j, mask=wanted, other=0)
    into = values + q_head.to(tl.int64) * rows + j
    result = tl.load(into, mask=wanted, other=0.0) * tl.exp2(log2_decay * tokens)
    count = tl.zeros([ROWS], tl.int64)
    for start in tl.range(0, tokens, QUERIES):
        token = start + tl.arange(0, QUERIES)
        real = token < tokens
        of_q = q + token.to(tl.int64)[:, None] * q_stride + q_head * q_head_stride + d[None, :]
        query = tl.load(of_q, mask=real[:, None] & (d < D)[None, :], other=0.0)
        x = logits_in_bits(query, keys, scale, logit_cap, CAP, WIDEN)
        own_lse = tl.load(lse + token * tl.num_programs(0) + q_head, mask=real, other=0.0) * LOG2_E
        seen = real[:, None] & wanted[None, :]
        position = tl.load(q_positions + token, mask=real, other=-1)
        if CAUSAL:
            seen &= row_position[None, :] <= position[:, None]
        # a query that sees nothing has a log-sum-exp of -inf, and no weights
        seen &= (own_lse != -float("inf"))[:, None]
        weights = tl.where(seen, tl.exp2(x - own_lse[:, None]), 0.0)
        if HOW == LARGEST:
            result = tl.maximum(result, tl.max(weights, 0))
        else:
            if HOW == SQUARES:
                weights = weights * weights
            if HOW == COUNT:
                # rows that the query sees, by bisection over ascending positions
                low = tl.zeros([QUERIES], tl.int32)
                high = tl.zeros([QUERIES], tl.int32) + rows
                for _ in tl.static_range(32):
                    middle = (low + high) // 2
                    open_ = low < high
                    before = tl.load(k_positions + middle, mask=open_, other=0) <= position
                    low = tl.where(open_ & before, middle + 1, low)
                    high = tl.where(open_ & ~before, middle, high)
                weights = (seen & (weights * low.to(tl.float32)[:, None] >= threshold)).to(tl.float32)
            age = (tokens - 1 - token).to(tl.float32)
            fade = tl.where(real, tl.exp2(log2_decay * age), 0.0)
            result += tl.sum(weights * fade[:, None], 0)
        count += tl.sum(seen.to(tl.int64), 0)
    tl.store(into, result, mask=wanted)
    if SEEN and q_head == 0:
        before = tl.load(seen_out + j, mask=wanted, other=0)
        tl.store(seen_out + j, before + count, mask=wanted)
