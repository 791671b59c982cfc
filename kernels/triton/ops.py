"""The Triton kernels behind the contract of `kernels/ops.py`.

Nothing here reads a tensor on the host but the number of holes, which the contract returns; `launch_*` leave
it on the device, so that they can be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvir.kernels.catalog import Tile, decode_tile, extend_tile
from kvir.kernels.ops import Bounds, Cache, Kernels
from kvir.kernels.triton.append import append_rows
from kvir.kernels.triton.decode import decode_items, merge_items
from kvir.kernels.triton.extend import extend_blocks
from kvir.kernels.triton.settings import available, padded, widen
from kvir.kernels.triton.work import WorkList, empty_work, plan_work

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
MERGED_ITEMS = 32  # partial results that a merge takes at a time
INTERPRETED_SLOTS = 6  # few, so that tests have lanes of several items

__all__ = ["KERNELS", "available"]


@dataclass(frozen=True)
class Partials:
    """Results of items that are parts of their lanes; one layer after the other uses them."""

    out: Tensor  # float32 [M, G, D]
    lse: Tensor  # float32 [M, G], base 2


def empty_partials(work: WorkList, group: int, head_dim: int) -> Partials:
    """Memory for the partial results of one layer."""
    device = work.meta.device
    return Partials(
        out=torch.empty((work.max_items, group, head_dim), dtype=torch.float32, device=device),
        lse=torch.empty((work.max_items, group), dtype=torch.float32, device=device),
    )


def tile_of_decode(q: Tensor, kv_heads: int) -> Tile:
    return decode_tile(q.shape[2], q.shape[1] // kv_heads, DTYPES[q.dtype], arch_of(q.device))


@cache
def arch_of(device: torch.device) -> str:
    """As compilers name it: sm_90."""
    if device.type != "cuda":
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def resident_blocks(device: torch.device, tile: Tile) -> int:
    """Blocks of decode that run at once."""
    if device.type != "cuda":
        return INTERPRETED_SLOTS
    return torch.cuda.get_device_properties(device).multi_processor_count * tile.blocks


def append(k: Tensor, v: Tensor, cache: Cache, slots: Tensor, unit0: int) -> None:
    """`kernels.ops.Append`."""
    tokens, kv_heads, head_dim = k.shape
    _require(
        k.dtype is v.dtype is cache.kv.dtype
        and k.shape == v.shape
        and k.stride(2) == v.stride(2) == 1
        and slots.dtype is torch.int64
        and slots.shape == (tokens,)
        and slots.is_contiguous()
        and _fits(cache, head_dim, unit0 + kv_heads),
        k=k, v=v, kv=cache.kv, table=cache.table, slots=slots,
    )  # fmt: skip
    if tokens == 0:
        return
    append_rows[(tokens,)](
        k, v, cache.kv, cache.kv if cache.bias is None else cache.bias, cache.table, slots, unit0,
        cache.table.shape[0], cache.table.stride(0), cache.kv.shape[0],
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        KV_HEADS=kv_heads, HEADS=padded(kv_heads), D=head_dim, DIM=padded(head_dim, 16), P=cache.kv.shape[2],
        BIAS=cache.bias is not None,
    )  # fmt: skip


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
    """`kernels.ops.AttendDecode`.  Plans the work of this one layer; a server plans all layers at once."""
    if q.shape[0] == 0:
        return 0
    tile = tile_of_decode(q, kv_heads)
    work = empty_work(1, q.shape[0] * kv_heads, resident_blocks(q.device, tile), q.device, unit0)
    plan_work(work, lens, bounds, kv_heads, tile.rows)
    partials = empty_partials(work, q.shape[1] // kv_heads, q.shape[2])
    holes = torch.zeros(1, dtype=torch.int32, device=q.device)
    launch_decode(
        q, cache, pages, lens, bounds, work, 0, partials, kv_heads, scale, logit_cap, out, holes, tile=tile
    )
    return int(holes)


def launch_decode(
    q: Tensor,
    cache: Cache,
    pages: Tensor,
    lens: Tensor,
    bounds: Bounds,
    work: WorkList,
    layer: int,
    partials: Partials,
    kv_heads: int,
    scale: float,
    logit_cap: float,
    out: Tensor,
    holes: Tensor,
    *,
    tile: Tile | None = None,
) -> None:
    """One layer of decode by a finished work list, of which it is layer number `layer`.

    holes: int32 [1]; what is missing is added to it.  The other arguments are those of `AttendDecode`.
    """
    batch, query_heads, head_dim = q.shape
    unit0 = work.unit0 + layer * kv_heads
    own = bounds.sink.dim() == 2
    _require(
        q.dtype is cache.kv.dtype is out.dtype
        and q.dtype in DTYPES
        and q.stride(2) == out.stride(2) == pages.stride(1) == 1
        and out.shape == q.shape
        and query_heads % kv_heads == 0
        and pages.dtype is lens.dtype is torch.int32
        and pages.shape[0] == batch
        and lens.shape == (batch,)
        and _fits(cache, head_dim, unit0 + kv_heads)
        and _bounds_fit(bounds, unit0 + kv_heads, batch)
        and scale > 0,
        q=q, kv=cache.kv, table=cache.table, out=out, pages=pages, lens=lens, sink=bounds.sink,
    )  # fmt: skip
    group = query_heads // kv_heads
    tile = tile or tile_of_decode(q, kv_heads)
    bounds_stride = bounds.sink.stride(0) if own else 0
    decode_items[(min(work.max_items, work.slots + batch * kv_heads),)](
        q, cache.kv, cache.kv if cache.bias is None else cache.bias, cache.table, pages, lens,
        bounds.sink, bounds.recent, work.item_lane[layer], work.item_start[layer], work.meta[layer],
        out, partials.out, partials.lse, holes,
        unit0, cache.kv.shape[0], cache.table.shape[0], pages.shape[1],
        cache.table.stride(0), pages.stride(0), bounds_stride,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), scale, logit_cap,
        KV_HEADS=kv_heads, G=group, GROUP=tile.queries, D=head_dim, DIM=padded(head_dim, 16),
        P=cache.kv.shape[2], ROWS=tile.rows, CAP=logit_cap > 0, BIAS=cache.bias is not None,
        WIDEN=widen(q), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    merge_items[(batch * kv_heads, group)](
        lens, bounds.sink, bounds.recent, work.first_full[layer], work.short_item[layer], work.meta[layer],
        out, partials.out, partials.lse, unit0, bounds_stride, out.stride(0), out.stride(1),
        KV_HEADS=kv_heads, G=group, D=head_dim, DIM=padded(head_dim, 16), ITEMS=MERGED_ITEMS, num_warps=4,
    )  # fmt: skip


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
    """`kernels.ops.AttendExtend`."""
    holes = torch.zeros(1, dtype=torch.int32, device=q.device)
    launch_extend(
        q, k_new, v_new, cache, pages, prefix_lens, extend_lens, bounds, unit0, scale, logit_cap, out, holes
    )
    return int(holes)


def launch_extend(
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
    holes: Tensor,
    *,
    lse: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """`AttendExtend`; holes: int32 [1], added to; lse: float32 [T, Hq], natural, written if given."""
    tokens, query_heads, head_dim = q.shape
    kv_heads, batch = k_new.shape[1], prefix_lens.shape[0]
    _require(
        q.dtype is k_new.dtype is v_new.dtype is cache.kv.dtype is out.dtype
        and q.dtype in DTYPES
        and q.stride(2) == k_new.stride(2) == v_new.stride(2) == out.stride(2) == pages.stride(1) == 1
        and out.shape == q.shape
        and k_new.shape == v_new.shape == (tokens, kv_heads, head_dim)
        and query_heads % kv_heads == 0
        and pages.dtype is prefix_lens.dtype is extend_lens.dtype is torch.int32
        and pages.shape[0] == batch
        and extend_lens.shape == (batch,)
        and bounds.sink.dim() == 1
        and _fits(cache, head_dim, unit0 + kv_heads)
        and _bounds_fit(bounds, unit0 + kv_heads, batch)
        and (lse is None or (lse.shape == (tokens, query_heads) and lse.is_contiguous()))
        and scale > 0,
        q=q, k_new=k_new, v_new=v_new, kv=cache.kv, table=cache.table, out=out, pages=pages,
        prefix_lens=prefix_lens, extend_lens=extend_lens, sink=bounds.sink,
    )  # fmt: skip
    if tokens == 0:
        return
    group = query_heads // kv_heads
    tile = tile or extend_tile(head_dim, DTYPES[q.dtype])
    block_tokens = tile.queries // group
    extend_blocks[(kv_heads, tokens // block_tokens + batch)](
        q, k_new, v_new, cache.kv, cache.table, pages, prefix_lens, extend_lens, bounds.sink, bounds.recent,
        out, holes if lse is None else lse, holes, batch, unit0,
        cache.kv.shape[0], cache.table.shape[0], pages.shape[1], cache.table.stride(0), pages.stride(0),
        q.stride(0), q.stride(1), k_new.stride(0), k_new.stride(1), v_new.stride(0), v_new.stride(1),
        out.stride(0), out.stride(1), scale, logit_cap,
        BATCH=padded(batch, 64), G=group, QUERIES=tile.queries, TOKENS=block_tokens, D=head_dim,
        DIM=padded(head_dim, 16), P=cache.kv.shape[2], ROWS=tile.rows, CAP=logit_cap > 0, LSE=lse is not None,
        WIDEN=widen(q), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _fits(cache: Cache, head_dim: int, units: int) -> bool:
    kv, table = cache.kv, cache.table
    return (
        kv.dim() == 4
        and kv.shape[1] == 2
        and kv.shape[3] == head_dim
        and kv.is_contiguous()
        and table.dtype is torch.int32
        and table.stride(1) == 1
        and units <= table.shape[1]
    )


def _bounds_fit(bounds: Bounds, units: int, batch: int) -> bool:
    sink, recent = bounds.sink, bounds.recent
    return (
        sink.dtype is recent.dtype is torch.int32
        and sink.shape == recent.shape
        and sink.shape[-1] >= units
        and (sink.dim() == 1 or sink.shape[:-1] == (batch,))
        and sink.is_contiguous()
        and recent.is_contiguous()
    )


def _require(fits: bool, **tensors: Tensor) -> None:
    if fits:
        return
    given = ", ".join(f"{name} {x.dtype} {list(x.shape)} strides {x.stride()}" for name, x in tensors.items())
    raise ValueError(f"arguments do not fit the contract in kernels/ops.py (scale must be positive): {given}")


KERNELS = Kernels(name="triton", append=append, attend_decode=attend_decode, attend_extend=attend_extend)
