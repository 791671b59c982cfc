"""Decode attention over ragged lanes: one program per item of the work list, then a merge of partial results.

Residency table, sinks, window and compact rows are all read in one pass: `Bounds` of a compacted request make
its compact rows the sinks, and the rows behind them its window (`kernels/ops.py`).
"""

# Triton's ranges and blocks exist for its compiler alone.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton.language as tl

from kvir.kernels.triton.rows import fold_in, head_pages, logits_in_bits, places, visible_rows
from kvir.kernels.triton.settings import LOG2_E, kernel


@kernel(
    "unit0", "head_page_count", "logical_pages", "max_pages", "table_stride", "pages_stride", "bounds_stride"
)
def decode_items(
    q,  # [B, Hq, D]
    kv,  # [N, 2, P, D]
    bias,  # float32 [N, P] or anything
    table,  # int32 [L, U]
    pages,  # int32 [B, max_pages]
    lens,  # int32 [B]
    sinks,  # int32 [U] or [B, U]
    recents,
    item_lane,  # of this layer
    item_start,
    meta,
    out,  # [B, Hq, D]: of lanes that are one item
    partial_out,  # float32 [M, G, D]
    partial_lse,  # float32 [M, G], base 2
    holes,  # int32 [1], added to
    unit0,
    head_page_count,
    logical_pages,
    max_pages,
    table_stride,
    pages_stride,
    bounds_stride,
    q_stride,
    q_head_stride,
    out_stride,
    out_head_stride,
    scale,
    logit_cap,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    GROUP: tl.constexpr,  # G padded
    D: tl.constexpr,
    DIM: tl.constexpr,  # D padded
    P: tl.constexpr,
    ROWS: tl.constexpr,  # at a time
    CAP: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    item = tl.program_id(0)
    if item >= tl.load(meta + 1):
        return
    chunk = tl.load(meta)
    lane = tl.load(item_lane + item)
    first = tl.load(item_start + item)
    b = lane // KV_HEADS
    head = lane % KV_HEADS
    unit = unit0 + head
    length = tl.load(lens + b)
    sink = tl.load(sinks + b * bounds_stride + unit)
    recent = tl.load(recents + b * bounds_stride + unit)
    count, hidden = visible_rows(length - 1, length, sink, recent)
    last = tl.minimum(first + chunk, count)

    g = tl.arange(0, GROUP)
    d = tl.arange(0, DIM)
    mine = (g < G)[:, None] & (d < D)[None, :]
    q_head = head * G + g
    of_q = q + b.to(tl.int64) * q_stride + q_head[:, None] * q_head_stride + d[None, :]
    query = tl.load(of_q, mask=mine, other=0.0)
    m = tl.full([GROUP], -float("inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, DIM], tl.float32)
    missing = tl.zeros([ROWS], tl.int32)
    own_pages = pages + b.to(tl.int64) * pages_stride
    step = tl.arange(0, ROWS)
    # ids are looked up one round ahead: K and V then hang on nothing but registers, and their loads can be
    # several rounds ahead of the arithmetic
    position = places(first + step, sink, hidden)
    wanted = first + step < last
    page, there = head_pages(
        position, wanted, own_pages, max_pages, table + unit, logical_pages, table_stride, head_page_count, P
    )
    for start in tl.range(first, last, ROWS):
        missing += (wanted & ~there).to(tl.int32)
        row = page.to(tl.int64) * (2 * P * D) + (position % P) * D
        of_k = kv + row[None, :] + d[:, None]
        k = tl.load(of_k, mask=there[None, :] & (d < D)[:, None], other=0.0)
        x = logits_in_bits(query, k, scale, logit_cap, CAP, WIDEN)
        if BIAS:
            x += tl.load(bias + page * P + position % P, mask=there, other=0.0)[None, :] * LOG2_E
        x = tl.where(there[None, :], x, -float("inf"))
        of_v = kv + P * D + row[:, None] + d[None, :]
        v = tl.load(of_v, mask=there[:, None] & (d < D)[None, :], other=0.0)
        m, total, acc = fold_in(m, total, acc, x, v, WIDEN)
        number = start + ROWS + step
        position = places(number, sink, hidden)
        wanted = number < last
        page, there = head_pages(
            position, wanted, own_pages, max_pages,
            table + unit, logical_pages, table_stride, head_page_count, P,
        )  # fmt: skip
    lost = tl.sum(missing)
    if lost > 0:
        tl.atomic_add(holes, lost)
    acc = acc / tl.where(total == 0, 1.0, total)[:, None]
    if count <= chunk:
        o = out + b.to(tl.int64) * out_stride + q_head[:, None] * out_head_stride + d[None, :]
        tl.store(o, acc.to(out.dtype.element_ty), mask=mine)
    else:
        tl.store(partial_out + (item * G + g)[:, None] * D + d[None, :], acc, mask=mine)
        tl.store(partial_lse + item * G + g, m + tl.log2(total), mask=g < G)


@kernel("unit0", "bounds_stride")
def merge_items(
    lens,
    sinks,
    recents,
    first_full,  # of this layer
    short_item,
    meta,
    out,
    partial_out,
    partial_lse,
    unit0,
    bounds_stride,
    out_stride,
    out_head_stride,
    KV_HEADS: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    ITEMS: tl.constexpr,  # at a time
):
    """One program per lane and query head.  Lanes of one item are done; lanes without rows get zeros."""
    lane = tl.program_id(0)
    g = tl.program_id(1)
    b = lane // KV_HEADS
    head = lane % KV_HEADS
    unit = unit0 + head
    length = tl.load(lens + b)
    sink = tl.load(sinks + b * bounds_stride + unit)
    recent = tl.load(recents + b * bounds_stride + unit)
    count, _ = visible_rows(length - 1, length, sink, recent)
    chunk = tl.load(meta)
    if (count <= chunk) & (count > 0):
        return
    full = count // chunk
    items = full + (count % chunk > 0).to(tl.int32)
    first = tl.load(first_full + lane)
    short = tl.load(short_item + lane)
    d = tl.arange(0, DIM)
    m = -float("inf")
    total = 0.0
    acc = tl.zeros([DIM], tl.float32)
    for start in tl.range(0, items, ITEMS):
        number = start + tl.arange(0, ITEMS)
        real = number < items
        place = tl.where(number < full, first + number, short) * G + g
        x = tl.load(partial_lse + place, mask=real, other=-float("inf"))
        mine = real[:, None] & (d < D)[None, :]
        part = tl.load(partial_out + place[:, None] * D + d[None, :], mask=mine, other=0.0)
        highest = tl.maximum(m, tl.max(x, 0))
        base = tl.where(highest == -float("inf"), 0.0, highest)
        weights = tl.exp2(x - base)
        shrink = tl.exp2(m - base)
        acc = acc * shrink + tl.sum(part * weights[:, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        m = highest
    acc = acc / tl.where(total == 0, 1.0, total)
    o = out + b.to(tl.int64) * out_stride + (head * G + g) * out_head_stride + d
    tl.store(o, acc.to(out.dtype.element_ty), mask=d < D)
