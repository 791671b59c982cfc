"""The contract of every kernel, once: what each op computes, its shapes, and the legend of all kernel files.

Legend
    B    requests in the batch            T    tokens of the batch, all requests one after another
    Hq   query heads of the layer         Hkv  KV heads of the layer
    G    Hq // Hkv; query head h reads KV head h // G
    D    head size                        P    rows of a head-page (= tokens of a logical page)
    U    units of the model               N    head-pages of the pool        L    logical pages
    unit of (attention layer l, KV head h) = l * Hkv + h; `unit0` = l * Hkv is the first unit of the layer

A row is visible to a query at position p (0-based, in its own sequence) iff its position j <= p and
    j < sink[unit]   or   j > p - recent[unit].
`recent` is FULL (2^31 - 1) for a unit that keeps everything.

Row j of a request lives in logical page `pages[b, j // P]`, at offset j % P; unit u holds it in head-page
`table[logical page, u]`, or nowhere (-1).  A row of the cache that some query sees and that lives nowhere is
a *hole*: the op does not read it, counts it (once per request and unit, however many queries see it) and the
caller fails, so that a bookkeeping error can never pass as an answer.  An id out of range counts as nowhere.

q, k, v, kv and out have one dtype.  q, k, v and out may have any strides with D contiguous, `pages` and
`table` any row stride; the rest is contiguous.  An empty request, or a query that sees no row, gets zeros.

Implementations: `kernels/ref` (plain torch, float32, slow and obvious), `kernels/cpu` (compiled) and
`kernels/triton` (GPUs); `kernels/dispatch` chooses by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

FULL = 2**31 - 1


@dataclass(frozen=True)
class Cache:
    """The pool and the residency table, as tensors on the device."""

    kv: Tensor  # [N, 2, P, D]; [:, 0] keys, [:, 1] values
    table: Tensor  # int32 [L, U]; head-page or -1
    bias: Tensor | None = None  # float32 [N, P], added to the logit of a row after the cap; None: zeros


@dataclass(frozen=True)
class Bounds:
    """What each unit may see.  In decode it may differ from request to request: then both are [B, U]."""

    sink: Tensor  # int32 [U]
    recent: Tensor  # int32 [U]


class Append(Protocol):
    """Write new rows into the pool, wherever their unit has a head-page for them; the others are dropped.

    `slots` holds the logical token id of each row (logical page * P + offset).  The bias of a new row is 0.
    """

    def __call__(
        self,
        k: Tensor,  # [T, Hkv, D], any strides with D contiguous
        v: Tensor,  # [T, Hkv, D]
        cache: Cache,
        slots: Tensor,  # int64 [T]
        unit0: int,
    ) -> None: ...


class AttendDecode(Protocol):
    """One query per request, at position lens[b] - 1; its own row is already in the pool.

    Returns the number of holes.
    """

    def __call__(
        self,
        q: Tensor,  # [B, Hq, D]
        cache: Cache,
        pages: Tensor,  # int32 [B, max_pages], logical pages in sequence order
        lens: Tensor,  # int32 [B], rows of the request, the query's own included
        bounds: Bounds,
        unit0: int,
        kv_heads: int,  # Hkv of the layer at hand
        scale: float,
        logit_cap: float,  # 0: none; else cap * tanh(logit / cap)
        out: Tensor,  # [B, Hq, D], written
    ) -> int: ...


class AttendExtend(Protocol):
    """A chunk of each request: queries at positions prefix_lens[b] + 0 .. extend_lens[b] - 1, against the
    resident prefix (through the table) and the chunk's own fresh rows (k_new, v_new: they may not survive
    in the pool).

    Reads of the prefix happen before anything of this layer is appended.  Rows that extends read have no
    bias: merged rows are private to a request in decode.  Returns the number of holes.
    """

    def __call__(
        self,
        q: Tensor,  # [T, Hq, D]
        k_new: Tensor,  # [T, Hkv, D]
        v_new: Tensor,  # [T, Hkv, D]
        cache: Cache,
        pages: Tensor,  # int32 [B, max_pages]; at least the pages of the prefix
        prefix_lens: Tensor,  # int32 [B]
        extend_lens: Tensor,  # int32 [B], sum = T
        bounds: Bounds,
        unit0: int,
        scale: float,
        logit_cap: float,
        out: Tensor,  # [T, Hq, D], written
    ) -> int: ...


@dataclass(frozen=True)
class Kernels:
    """One implementation of every op."""

    name: str
    append: Append
    attend_decode: AttendDecode
    attend_extend: AttendExtend
