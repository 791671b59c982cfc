"""Weights of the last queries over rows that are reached through the table: what a trigger step scores by.

Lanes are (layer, request, KV head); only lanes that select do anything.  Their last queries lie in a ring
(`remember_queries`), and each of them sees the lane's visible rows up to its own position.  Two passes, as in
`columns.py`: the log-sum-exp of each query, then the mean weight of each candidate.
"""

# Triton's ranges and blocks exist for its compiler alone.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton.language as tl

from kvir.kernels.triton.rows import head_pages, logits_in_bits, places, visible_rows
from kvir.kernels.triton.settings import kernel


@kernel("layer", "ring_rows", "window")
def remember_queries(
    q,  # [T, Hq, D]
    ring,  # [R, layers, W, Hq, D], written
    ring_rows_of,  # int64 [T]: the request's row of the ring
    ends,  # int [T]: tokens of the request up to and with the query's; 0: padding
    layer,
    ring_rows,
    window,
    q_stride,
    q_head_stride,
    ring_stride,
    layer_stride,
    HQ: tl.constexpr,
    HEADS: tl.constexpr,  # padded
    D: tl.constexpr,
    DIM: tl.constexpr,
):
    """One program per token.  Of one request, a launch may hold no two positions that are W apart."""
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(ring_rows_of + token)
    position = tl.load(ends + token) - 1
    if (position < 0) | (row < 0) | (row >= ring_rows):
        return
    head = tl.arange(0, HEADS)
    d = tl.arange(0, DIM)
    mine = (head < HQ)[:, None] & (d < D)[None, :]
    of_q = q + token * q_stride + head[:, None] * q_head_stride + d[None, :]
    into = ring + row * ring_stride + layer * layer_stride + (position % window) * (HQ * D)
    tl.store(into + head[:, None] * D + d[None, :], tl.load(of_q, mask=mine, other=0.0), mask=mine)


@kernel()
def lane_facts(
    lens,
    spare_counts,
    sinks,
    recents,
    windows,
    moves,
    UNITS: tl.constexpr,
    P: tl.constexpr,
):
    """Of the program's lane: whether it selects, its visible rows, and its observed queries."""
    lane = tl.program_id(0)
    b = lane // UNITS
    unit = lane % UNITS
    length = tl.load(lens + b)
    selects = (tl.load(moves + lane) != 0) & (length > 0)
    count, hidden = visible_rows(length - 1, length, tl.load(sinks + lane), tl.load(recents + lane))
    tokens = length - tl.load(spare_counts + b) * P
    observed = tl.minimum(tl.load(windows + unit), tokens)
    return b, unit, selects, count, hidden, tokens, observed


@kernel()
def lane_rows(
    i,  # [ROWS]: numbers of visible rows
    stop,
    sink,
    hidden,
    pages,  # int32 [B, max_pages]
    b,
    max_pages,
    table,
    unit,
    logical_pages,
    table_stride,
    pages_stride,
    head_page_count,
    D: tl.constexpr,
    P: tl.constexpr,
):
    """Where the keys of rows below `stop` begin in the pool, and whether they are there."""
    position = places(i, sink, hidden)
    page, there = head_pages(
        position, i < stop, pages + b.to(tl.int64) * pages_stride, max_pages, table + unit, logical_pages,
        table_stride, head_page_count, P,
    )  # fmt: skip
    return page.to(tl.int64) * (2 * P * D) + (position % P) * D, there


@kernel()
def observed_logits(
    q,  # the request's and layer's part of the ring
    k,  # [DIM, ROWS]
    pair,  # [QUERIES]: (age, query head of the group), age 0 is the newest query
    tokens,
    observed,
    first_head,  # query head of the lane
    window,
    scale,
    logit_cap,
    HQ: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    CAP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """[QUERIES, ROWS] in bits, without regard to what a query sees."""
    age = pair // G
    real = age < observed
    slot = tl.where(real, (tokens - 1 - age) % window, 0)
    d = tl.arange(0, DIM)
    of_q = q + slot[:, None] * (HQ * D) + (first_head + pair % G)[:, None] * D + d[None, :]
    query = tl.load(of_q, mask=real[:, None] & (d < D)[None, :], other=0.0)
    return logits_in_bits(query, k, scale, logit_cap, CAP, WIDEN)


@kernel(
    "head_page_count", "logical_pages", "max_pages", "table_stride", "pages_stride", "window", "max_pairs"
)
def window_lse(
    ring,
    rows,  # int64 [B]: rows of the ring
    kv,
    table,
    pages,
    lens,
    spare_counts,
    sinks,  # int32 [B, U]
    recents,
    windows,  # int32 [U]
    moves,  # int32 [B, U]
    lse,  # float32 [B, U, max_pairs], in bits, written
    head_page_count,
    logical_pages,
    max_pages,
    table_stride,
    pages_stride,
    window,
    max_pairs,
    ring_stride,
    layer_stride,
    scale,
    logit_cap,
    UNITS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HQ: tl.constexpr,
    G: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    CAP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One program per lane and block of (query, query head) pairs."""
    b, unit, selects, count, hidden, tokens, observed = lane_facts(
        lens, spare_counts, sinks, recents, windows, moves, UNITS, P
    )
    pair = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    if ~selects | (tl.program_id(1) * QUERIES >= observed * G):
        return
    lane = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks + lane)
    of_ring = ring + tl.load(rows + b) * ring_stride + (unit // KV_HEADS).to(tl.int64) * layer_stride
    d = tl.arange(0, DIM)
    m = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    for start in tl.range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        row, there = lane_rows(
            i, count, sink, hidden, pages, b, max_pages, table, unit, logical_pages, table_stride,
            pages_stride, head_page_count, D, P,
        )  # fmt: skip
        keys = tl.load(kv + row[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
        x = observed_logits(
            of_ring, keys, pair, tokens, observed, unit % KV_HEADS * G, window, scale, logit_cap,
            HQ, G, D, DIM, CAP, WIDEN,
        )  # fmt: skip
        # the rows after a query are the newest ones, of which nothing has been dropped
        seen = there[None, :] & (i[None, :] < count - (pair // G)[:, None])
        x = tl.where(seen, x, -float("inf"))
        highest = tl.maximum(m, tl.max(x, 1))
        base = tl.where(highest == -float("inf"), 0.0, highest)
        total = total * tl.exp2(m - base) + tl.sum(tl.exp2(x - base[:, None]), 1)
        m = highest
    tl.store(lse + lane * max_pairs + pair, m + tl.log2(total), mask=pair < observed * G)


@kernel(
    "head_page_count", "logical_pages", "max_pages", "table_stride", "pages_stride", "window", "max_pairs",
    "max_candidates",
)  # fmt: skip
def window_means(
    ring,
    rows,
    kv,
    table,
    pages,
    lens,
    spare_counts,
    sinks,
    recents,
    windows,
    moves,
    lse,
    candidates,  # int32 [B, U, 2]: a run of visible rows
    scores,  # float32 [B, U, max_candidates], written
    head_page_count,
    logical_pages,
    max_pages,
    table_stride,
    pages_stride,
    window,
    max_pairs,
    max_candidates,
    ring_stride,
    layer_stride,
    scale,
    logit_cap,
    UNITS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HQ: tl.constexpr,
    G: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
    CAP: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Programs of a lane share its candidates: the mean weight over queries and query heads."""
    b, unit, selects, count, hidden, tokens, observed = lane_facts(
        lens, spare_counts, sinks, recents, windows, moves, UNITS, P
    )
    lane = tl.program_id(0).to(tl.int64)
    first = tl.load(candidates + lane * 2)
    last = tl.minimum(tl.load(candidates + lane * 2 + 1), count)
    if ~selects:
        return
    sink = tl.load(sinks + lane)
    of_ring = ring + tl.load(rows + b) * ring_stride + (unit // KV_HEADS).to(tl.int64) * layer_stride
    d = tl.arange(0, DIM)
    pairs = observed * G
    for block in tl.range(first + tl.program_id(1) * ROWS, last, tl.num_programs(1) * ROWS):
        i = block + tl.arange(0, ROWS)
        row, there = lane_rows(
            i, last, sink, hidden, pages, b, max_pages, table, unit, logical_pages, table_stride,
            pages_stride, head_page_count, D, P,
        )  # fmt: skip
        keys = tl.load(kv + row[None, :] + d[:, None], mask=there[None, :] & (d < D)[:, None], other=0.0)
        weight = tl.zeros([ROWS], tl.float32)
        for start in tl.range(0, pairs, QUERIES):
            pair = start + tl.arange(0, QUERIES)
            x = observed_logits(
                of_ring, keys, pair, tokens, observed, unit % KV_HEADS * G, window, scale, logit_cap,
                HQ, G, D, DIM, CAP, WIDEN,
            )  # fmt: skip
            own = tl.load(lse + lane * max_pairs + pair, mask=pair < pairs, other=0.0)
            seen = there[None, :] & (pair < pairs)[:, None] & (i[None, :] < count - (pair // G)[:, None])
            weight += tl.sum(tl.where(seen, tl.exp2(x - own[:, None]), 0.0), 0)
        into = scores + lane * max_candidates + i - first
        tl.store(into, weight / pairs.to(tl.float32), mask=(i < last) & (i - first < max_candidates))
