"""Cases of the Triton kernels that append, plan, score and compact; run like `support.triton_cases`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from kvir.kernels.catalog import decode_tile
from kvir.kernels.ops import FULL, Bounds, Cache
from kvir.kernels.ref import compact as ref_compact
from kvir.kernels.ref import score_running
from kvir.kernels.ref.ops import KERNELS as REF
from kvir.kernels.ref.score_attention import window_weights
from kvir.kernels.score_ops import ScoreInputs
from kvir.policy_ir.scores import Accumulated, Attention, Persistent
from support.triton_cases import BF16, FLOAT, HALF, off, run

JoinOf = Literal["mean", "sum", "max", "squares", "l2"]
JOINS: tuple[JoinOf, ...] = ("mean", "sum", "max", "squares", "l2")
SUMS = (
    Accumulated(),
    Accumulated(rows="squares"),
    Accumulated(decay=0.9),
    Persistent(history=20),
    Persistent(threshold=0.0),
)
GROUPS = ((1, 64), (3, 64), (4, 128), (2, 80), (16, 96), (2, 256))  # query heads per KV head, head size


def random(seed: int, *shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def append(dtype: torch.dtype, heads: int, head_dim: int, page_rows: int, strided: bool) -> float:
    """Rows whose unit has a head-page are written, others nowhere; bits are equal."""
    from kvir.kernels.triton.ops import KERNELS

    torch.manual_seed(0)
    tokens, width = 60, heads * head_dim
    fused = torch.randn(tokens, 2 * width + 8).to(dtype)
    k, v = (fused[:, i * width : (i + 1) * width].unflatten(1, (heads, head_dim)) for i in (0, 1))
    if not strided:
        k, v = k.contiguous(), v.contiguous()
    table = torch.randperm(20 * 3 * heads).to(torch.int32).view(20, 3 * heads)
    table[torch.rand(table.shape) < 0.4] = -1
    table[3, heads] = 10**6  # past the pool
    slots = torch.randperm(20 * page_rows)[:tokens].clone()
    slots[:3] = torch.tensor([-1, 20 * page_rows, 10**12])
    slots = slots[: min(tokens, len(slots))].contiguous()
    k, v = k[: len(slots)], v[: len(slots)]
    pools = [torch.zeros(60 * heads, 2, page_rows, head_dim, dtype=dtype) for _ in range(2)]
    REF.append(k, v, Cache(pools[0], table), slots, heads)
    KERNELS.append(k, v, Cache(pools[1], table), slots, heads)
    assert pools[0].count_nonzero() > 0
    assert torch.equal(pools[0], pools[1])
    return 0.0


def compact(dtype: torch.dtype, head_dim: int, page_rows: int, count: int) -> float:
    from kvir.kernels.triton.compact import compact as in_triton

    k, v = random(1, 90, 2, head_dim, dtype=dtype)[:, 1], random(2, 90, head_dim, dtype=dtype)
    rows = torch.randperm(90, generator=torch.Generator().manual_seed(count))[:count].sort().values
    pages = torch.randperm(120, generator=torch.Generator().manual_seed(3))[: -(-count // page_rows) + 1]
    pools = [torch.full((120, 2, page_rows, head_dim), 7, dtype=dtype) for _ in range(2)]
    assert ref_compact.compact(k, v, rows, pools[0], pages) == count
    assert in_triton(k, v, rows, pools[1], pages) == count
    assert torch.equal(pools[0], pools[1])
    return 0.0


def compact_units() -> float:
    """Units keep numbers of rows that only the device knows."""
    from kvir.kernels.triton.compact import launch_compact

    k, v = random(1, 90, 3, 64), random(2, 90, 3, 64)
    counts = [0, 33, 90]
    rows = torch.zeros(3, 90, dtype=torch.int64)
    pages = torch.arange(18, dtype=torch.int32).view(3, 6)
    wanted, got = torch.zeros(18, 2, 16, 64), torch.zeros(18, 2, 16, 64)
    for unit, count in enumerate(counts):
        rows[unit, :count] = torch.randperm(90)[:count].sort().values
        ref_compact.compact(k[:, unit], v[:, unit], rows[unit, :count], wanted, pages[unit])
    launch_compact(k, v, rows, torch.tensor(counts, dtype=torch.int32), got, pages)
    assert torch.equal(got, wanted)
    return 0.0


def sums(spec: Accumulated | Persistent, group: int, head_dim: int, dtype: torch.dtype, cap: float) -> float:
    """Two chunks, rows evicted between them."""
    from kvir.kernels.triton.sums import ColumnSums, log_sum_exp

    q, k = random(1, 70, 2 * group, head_dim, dtype=dtype), random(2, 70, 2, head_dim, dtype=dtype)
    scale, kept = head_dim**-0.5, torch.arange(0, 40, 3)
    first = 50 if isinstance(spec, Persistent) and spec.history else 0
    ref = score_running.ColumnSums(spec, 2 * group, scale, logit_cap=cap, first_query=first)
    got = ColumnSums(spec, 2 * group, scale, logit_cap=cap, first_query=first)
    positions = torch.arange(70)
    lse = score_running.log_sum_exp(q[:40], k[:40], positions[:40], scale, logit_cap=cap)
    worst = off(log_sum_exp(q[:40], k[:40], positions[:40], scale, logit_cap=cap), lse)
    for running in (ref, got):
        running.update(q[:40], lse, k[:40], positions[:40])
        running.keep(kept)
    there = torch.cat([kept, positions[40:]])
    lse = score_running.log_sum_exp(q[40:], k[there], positions[40:], scale, logit_cap=cap, k_positions=there)
    for running in (ref, got):
        running.update(q[40:], lse, k[there], positions[40:], there)
    assert torch.equal(got.sums().seen, ref.sums().seen)
    return max(worst, off(got.sums().values, ref.sums().values))


def window(how: JoinOf, group: int, head_dim: int, dtype: torch.dtype, causal: bool) -> float:
    """The weights of observed queries, joined over the queries, for rows that are not all of the sequence."""
    from kvir.kernels.triton.sums import window_columns

    positions = torch.cat([torch.arange(0, 100, 4), torch.arange(100, 116)])
    q = random(1, 16, 2 * group, head_dim, dtype=dtype)
    k = random(2, len(positions), 2, head_dim, dtype=dtype)
    inputs = ScoreInputs(k.float(), k.float(), (0, 1), head_dim**-0.5, positions=positions, q_obs=q.float())
    weights = window_weights(Attention(window=16, causal=causal), inputs).flatten(0, 1)  # [Hq, W, n]
    wanted = {
        "mean": weights.mean(dim=1),
        "sum": weights.sum(dim=1),
        "max": weights.amax(dim=1),
        "squares": weights.square().sum(dim=1),
        "l2": weights.square().sum(dim=1).sqrt(),
    }[how]
    got = window_columns(
        q,
        k,
        positions[-16:],
        inputs.scale,
        how,
        k_positions=positions,
        causal=causal,
    )
    return off(got, wanted)


def work(batch: int, kv_heads: int, slots: int, longest: int) -> float:
    """Every visible row is in exactly one item; long items come first; the list fits its fixed size."""
    from kvir.kernels.triton.work import empty_work, plan_work

    generator = torch.Generator().manual_seed(batch * slots)
    lens = torch.randint(0, longest, (batch,), generator=generator, dtype=torch.int32)
    layers, unit0 = 2, kv_heads
    units = unit0 + layers * kv_heads
    sink = torch.randint(0, 40, (units,), generator=generator, dtype=torch.int32)
    recent = torch.randint(1, 300, (units,), generator=generator, dtype=torch.int32)
    recent[::3] = FULL
    planned = empty_work(layers, batch * kv_heads, slots, "cpu", unit0)
    plan_work(planned, lens, Bounds(sink, recent), kv_heads, 64)
    for layer in range(layers):
        chunk, items, full, _ = planned.meta[layer].tolist()
        of_lane = torch.arange(batch * kv_heads)
        unit = unit0 + layer * kv_heads + of_lane % kv_heads
        length = lens[of_lane // kv_heads].long()
        rows = length - ((length - recent[unit]).clamp(min=0) - sink[unit]).clamp(min=0)
        assert chunk % 64 == 0
        assert chunk * slots >= rows.sum()
        assert full == (rows // chunk).sum() <= slots
        assert items == ((rows + chunk - 1) // chunk).sum() <= planned.max_items
        lane, start = planned.item_lane[layer, :items].long(), planned.item_start[layer, :items].long()
        covered = {(int(a), int(b)) for a, b in zip(lane, start, strict=True)}
        assert covered == {(i, s) for i, n in enumerate(rows.tolist()) for s in range(0, n, chunk)}
        sizes = (rows[lane] - start).clamp(max=chunk)
        assert (sizes[:full] == chunk).all()
        assert (sizes[full:].diff() <= chunk // 16 + 1).all()
        for i, n in enumerate(rows.tolist()):
            first, short = int(planned.first_full[layer, i]), int(planned.short_item[layer, i])
            assert lane[first : first + n // chunk].eq(i).all()
            assert n % chunk == 0 or (int(lane[short]) == i and int(start[short]) == n - n % chunk)
    return 0.0


def makespan(batch: int, share: float, most: float) -> float:
    """The list for a ragged batch on an H200, simulated; and that the bench simulates the same list."""
    from bench.parts.makespan import item_rows, over_ideal, ragged_rows, slots_of
    from kvir.kernels.triton.work import empty_work, plan_work

    tile, heads = decode_tile(128, 4, "bfloat16"), 8
    slots, rows = slots_of(132, tile), ragged_rows(batch, share)
    lens = torch.tensor(rows, dtype=torch.int32).view(batch, heads).amax(dim=1).contiguous()
    recent = torch.tensor(rows, dtype=torch.int32).view(batch, heads)
    bounds = Bounds(torch.zeros_like(recent), recent)
    planned = empty_work(1, batch * heads, slots, "cpu")
    plan_work(planned, lens, bounds, heads, tile.rows)
    chunk, items, _, _ = planned.meta[0].tolist()
    lane, start = planned.item_lane[0, :items].long(), planned.item_start[0, :items]
    sizes = (torch.tensor(rows)[lane] - start).clamp(max=chunk).tolist()
    wanted = item_rows(rows, slots, tile.rows)
    assert sorted(sizes) == sorted(wanted)
    classes = [(n * 16 - 1) // chunk for n in sizes]
    assert classes == [(n * 16 - 1) // chunk for n in wanted]
    return over_ideal(sizes, slots) / most


CASES: dict[str, Callable[[], float]] = {
    **{
        f"append-{t}-{h}-{d}-{p}-{'strided' if s else 'contiguous'}": (
            lambda t=t, h=h, d=d, p=p, s=s: append(t, h, d, p, s)
        )
        for t in (FLOAT, BF16, HALF)
        for h, d, p, s in ((3, 40, 16, False), (2, 64, 16, True), (8, 128, 3, True))
    },
    **{
        f"compact-{t}-{d}-{p}-{n}": (lambda t=t, d=d, p=p, n=n: compact(t, d, p, n))
        for t in (FLOAT, BF16, HALF)
        for d, p, n in ((64, 16, 33), (80, 8, 90), (128, 16, 1), (64, 16, 0))
    },
    "compact-units": compact_units,
    **{
        f"sums-{i}-{g}-{d}-{t}": (lambda s=s, g=g, d=d, t=t: sums(s, g, d, t, 0.0))
        for i, s in enumerate(SUMS)
        for g, d in GROUPS[:3]
        for t in (FLOAT, HALF)
    },
    **{f"sums-cap-{i}": (lambda s=s: sums(s, 2, 80, FLOAT, 20.0)) for i, s in enumerate(SUMS)},
    "sums-bfloat16": lambda: sums(SUMS[0], 3, 64, BF16, 0.0),
    **{
        f"window-{how}-{g}-{d}-{t}-{causal}": (
            lambda how=how, g=g, d=d, t=t, c=causal: window(how, g, d, t, c)
        )
        for n, how in enumerate(JOINS)
        for g, d in (GROUPS[n], GROUPS[-1 - n])
        for t, causal in ((FLOAT, True), (HALF, False))
    },
    **{
        f"work-{b}-{h}-{s}-{n}": (lambda b=b, h=h, s=s, n=n: work(b, h, s, n))
        for b, h, s, n in ((1, 1, 1, 2), (1, 8, 6, 3000), (5, 3, 40, 900), (32, 8, 660, 9000), (7, 2, 3, 100))
    },
    "makespan-32-quarter-full": lambda: makespan(32, 0.25, 1.15),
    "makespan-8-quarter-full": lambda: makespan(8, 0.25, 1.35),
    "makespan-128-quarter-full": lambda: makespan(128, 0.25, 1.15),
    "makespan-32-all-full": lambda: makespan(32, 1.0, 1.15),
}

if __name__ == "__main__":
    json.dump(run(CASES), sys.stdout)
