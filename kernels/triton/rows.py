"""Which rows a query sees and where they are: what every attention kernel here begins with.

Rows visible at a position are two runs, the sinks and the window.  Kernels count them through: row number i
of a unit is at position i while it is a sink, and `hidden` places further on after that.  So a kernel goes
over visible rows alone, and what lies between costs nothing.
"""

from __future__ import annotations

import triton.language as tl

from kvir.kernels.triton.settings import LOG2_E, kernel


@kernel()
def visible_rows(position, stop, sink, recent):
    """Of rows [0, `stop`), how many a query at `position` sees, and how many are hidden behind the sinks.

    `stop` is at most `position` + 1.  Scalars or blocks, int32.
    """
    window = tl.minimum(tl.maximum(position + 1 - recent, 0), stop)
    hidden = tl.maximum(window - sink, 0)
    return stop - hidden, hidden


@kernel()
def places(numbers, sink, hidden):
    """Positions of visible rows `numbers`."""
    return numbers + tl.where(numbers >= sink, hidden, 0)


@kernel()
def head_pages(
    positions,  # int32 [N], rows of the request
    wanted,  # bool [N]
    pages,  # the request's list of logical pages
    page_count,  # its length
    table,  # column of the unit
    logical_pages,
    table_stride,
    head_page_count,
    P: tl.constexpr,
):
    """Head-pages of rows, and whether they are there: an id out of range leads nowhere, and is not read."""
    index = positions // P
    listed = wanted & (index < page_count)
    page = tl.load(pages + index, mask=listed, other=-1)
    known = listed & (page >= 0) & (page < logical_pages)
    found = tl.load(table + page.to(tl.int64) * table_stride, mask=known, other=-1)
    return found, known & (found >= 0) & (found < head_page_count)


@kernel()
def logits_in_bits(q, k, scale, logit_cap, CAP: tl.constexpr, WIDEN: tl.constexpr):
    """q [M, D] times k [D, N], scaled, capped and times log2(e), so that exp2 gives weights.

    WIDEN is for Triton's interpreter, which multiplies bfloat16 bit patterns as if they were integers.
    float32 is multiplied in three steps of tensor cores, which come to float32's own precision.
    """
    if WIDEN:
        q = q.to(tl.float32)
        k = k.to(tl.float32)
    x = tl.dot(q, k, input_precision="tf32x3") * scale
    if CAP:
        # tanh(y) = 2 sigmoid(2 y) - 1
        x = logit_cap * (2 * tl.sigmoid(2 * x / logit_cap) - 1)
    return x * LOG2_E


@kernel()
def fold_in(m, total, acc, x, v, WIDEN: tl.constexpr):
    """One step of the running softmax: logits x [M, N], -inf where a row is not seen, and values v [N, D]."""
    highest = tl.maximum(m, tl.max(x, 1))
    # nothing seen so far: any finite reference will do, infinity less infinity would be NaN
    base = tl.where(highest == -float("inf"), 0.0, highest)
    weights = tl.exp2(x - base[:, None])
    shrink = tl.exp2(m - base)
    total = total * shrink + tl.sum(weights, 1)
    weights = weights.to(v.dtype)
    if WIDEN:
        weights = weights.to(tl.float32)
        v = v.to(tl.float32)
    acc = acc * shrink[:, None] + tl.dot(weights, v, input_precision="tf32x3")
    return highest, total, acc
