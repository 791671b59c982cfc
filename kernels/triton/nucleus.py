"""Which candidates stay by mass, and the copy that closes the gaps: the second half of a trigger step.

One program per lane goes over its scores a few times: no sort, no memory but the flags.  Scores are weights,
so not negative, and their bits order them as integers: thresholds are found bit by bit.
"""

# Triton's ranges and blocks exist for its compiler alone.
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton.language as tl

from kvir.kernels.triton.settings import kernel
from kvir.kernels.triton.window import lane_facts, lane_rows

HIGHEST_BIT = tl.constexpr(1 << 30)  # of a float32 that is not negative
BITS = tl.constexpr(31)
MASS = tl.constexpr(0)
COUNT = tl.constexpr(1)


@kernel()
def held_from(scores, bits, count, WHAT: tl.constexpr, ABOVE: tl.constexpr, ROWS: tl.constexpr):
    """Of `count` scores, those of at least `bits`, or above: float64, their sum or their number."""
    total = tl.full([], 0.0, tl.float64)
    for start in tl.range(0, count, ROWS):
        i = start + tl.arange(0, ROWS)
        x = tl.load(scores + i, mask=i < count, other=0.0)
        own = x.to(tl.int32, bitcast=True)
        chosen = (i < count) & (own > bits if ABOVE else own >= bits)
        if WHAT == MASS:
            total += tl.sum(tl.where(chosen, x.to(tl.float64), 0.0), 0)
        else:
            total += tl.sum(chosen.to(tl.int32), 0).to(tl.float64)
    return total


@kernel()
def threshold(scores, wanted, count, WHAT: tl.constexpr, ROWS: tl.constexpr):
    """The largest bits so that the scores of at least that hold `wanted`; 0 if none do."""
    bits = tl.full([], 0, tl.int32)
    bit = tl.full([], HIGHEST_BIT, tl.int32)
    for _ in tl.range(0, BITS):
        tried = bits | bit
        bits = tl.where(held_from(scores, tried, count, WHAT, False, ROWS) >= wanted, tried, bits)
        bit = bit >> 1
    return bits


@kernel("max_candidates")
def choose_rows(
    lens,
    spare_counts,
    sinks,
    recents,
    windows,
    moves,
    candidates,
    left,  # int32 [B, U]: last rows, which stay where they are
    scores,
    masses,  # float64 [U]
    floors,  # int32 [U]
    caps,  # int32 [U]
    kept,  # int8 [B, U, max_candidates], written
    counts,  # int32 [B, U], written: rows that go to compact head-pages
    max_candidates,
    UNITS: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
):
    """As many of the best candidates as hold the mass, at least `floors`, at most `caps`; among equals the
    older ones (`kernels/ref/select_mass.py`).
    """
    _, unit, selects, count, _, _, _ = lane_facts(
        lens, spare_counts, sinks, recents, windows, moves, UNITS, P
    )
    if ~selects:
        return
    lane = tl.program_id(0).to(tl.int64)
    first = tl.load(candidates + lane * 2)
    size = tl.minimum(tl.load(candidates + lane * 2 + 1), count) - first
    size = tl.minimum(tl.maximum(size, 0), max_candidates)
    mine = scores + lane * max_candidates
    total = held_from(mine, 0, size, MASS, False, ROWS)
    wanted = tl.load(masses + unit) * total
    bits = threshold(mine, wanted, size, MASS, ROWS)
    above = held_from(mine, bits, size, MASS, True, ROWS)
    rows = held_from(mine, bits, size, COUNT, True, ROWS)
    value = bits.to(tl.float32, bitcast=True).to(tl.float64)
    # of the scores that equal the threshold, as many as are needed; the first one always is.  A guess in
    # float32 that products correct: a division of float64 is a call, for which some builds spill
    needed = wanted - above
    guess = tl.ceil(needed.to(tl.float32) / tl.where(value > 0, value, 1.0).to(tl.float32)).to(tl.float64)
    equal = tl.where((guess - 1) * value >= needed, guess - 1, guess)
    equal = tl.where(guess * value < needed, guess + 1, equal)
    equal = tl.where(value > 0, equal, 1.0)
    nucleus = tl.where(total > 0, rows + tl.maximum(equal, 1.0), 0.0).to(tl.int32)
    nucleus = tl.minimum(nucleus, size)
    nucleus = tl.maximum(nucleus, tl.minimum(tl.load(floors + unit), size))
    nucleus = tl.minimum(nucleus, tl.load(caps + unit))
    bits = threshold(mine, nucleus.to(tl.float64), size, COUNT, ROWS)
    equals = nucleus - held_from(mine, bits, size, COUNT, True, ROWS).to(tl.int32)
    seen = 0
    for start in tl.range(0, size, ROWS):
        i = start + tl.arange(0, ROWS)
        x = tl.load(mine + i, mask=i < size, other=0.0).to(tl.int32, bitcast=True)
        tied = ((i < size) & (x == bits)).to(tl.int32)
        number = seen + tl.cumsum(tied, 0)
        stays = (x > bits) | ((tied != 0) & (number <= equals))
        tl.store(kept + lane * max_candidates + i, stays.to(tl.int8), mask=i < size)
        seen += tl.sum(tied, 0)
    tl.store(counts + lane, count - size + nucleus - tl.load(left + lane))


@kernel(
    "head_page_count", "logical_pages", "max_pages", "table_stride", "pages_stride", "max_candidates",
    "dest_pages",
)  # fmt: skip
def close_gaps(
    kv,  # [N, 2, P, D], read and written
    table,
    pages,
    lens,
    spare_counts,
    sinks,
    recents,
    windows,
    moves,
    candidates,
    left,
    kept,
    placed,  # int32 [B, U]: first rows that lie in `dest` already
    dest,  # int32 [B, U, dest_pages]: head-pages, first those that the lane has
    head_page_count,
    logical_pages,
    max_pages,
    table_stride,
    pages_stride,
    max_candidates,
    dest_pages,
    UNITS: tl.constexpr,
    D: tl.constexpr,
    DIM: tl.constexpr,
    P: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows that stay, in order, to `dest`: one program per lane, from its first row on.

    A row never moves up, and a block is read before it is written: a lane's own pages may be rewritten.
    """
    b, unit, selects, count, hidden, _, _ = lane_facts(
        lens, spare_counts, sinks, recents, windows, moves, UNITS, P
    )
    if ~selects:
        return
    lane = tl.program_id(0).to(tl.int64)
    sink = tl.load(sinks + lane)
    first = tl.load(candidates + lane * 2)
    last = tl.load(candidates + lane * 2 + 1)
    stop = count - tl.load(left + lane)
    begin = tl.minimum(tl.load(placed + lane), first)
    written = begin
    d = tl.arange(0, DIM)
    for start in tl.range(begin, stop, ROWS):
        i = start + tl.arange(0, ROWS)
        row, there = lane_rows(
            i, stop, sink, hidden, pages, b, max_pages, table, unit, logical_pages, table_stride,
            pages_stride, head_page_count, D, P,
        )  # fmt: skip
        inside = (i >= first) & (i < last)
        flag = tl.load(kept + lane * max_candidates + i - first, mask=inside & (i < stop), other=1)
        stays = ((i < stop) & (flag != 0)).to(tl.int32)
        to = written + tl.cumsum(stays, 0) - stays
        written += tl.sum(stays, 0)
        own = tl.load(
            dest + lane * dest_pages + to // P, mask=(stays != 0) & (to // P < dest_pages), other=-1
        )
        moved = (stays != 0) & there & (own >= 0) & (own < head_page_count)
        mine = moved[:, None] & (d < D)[None, :]
        of_k = kv + row[:, None] + d[None, :]
        k = tl.load(of_k, mask=mine, other=0.0)
        v = tl.load(of_k + P * D, mask=mine, other=0.0)
        tl.debug_barrier()
        into = kv + (own.to(tl.int64) * (2 * P * D) + (to % P) * D)[:, None] + d[None, :]
        tl.store(into, k, mask=mine)
        tl.store(into + P * D, v, mask=mine)
        tl.debug_barrier()
