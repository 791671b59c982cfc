"""The compiled kernels behind the contract of `kernels/ops.py`.  D must be a multiple of 8.

Work runs on the OpenMP pool that torch itself uses, on `torch.get_num_threads()` threads, without the GIL.
Results depend neither on the number of threads nor on the other requests of a batch.
"""

from __future__ import annotations

import ctypes
import os
import sysconfig
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, get_num_threads

from kvir.kernels.cpu.build import sources_digest
from kvir.kernels.ops import Bounds, Cache, Kernels

_ops: Any
_missing: ImportError | None
try:
    _ops, _missing = import_module("kvir.kernels.cpu._ops"), None
except ImportError as error:
    _ops, _missing = None, error

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def available() -> str | None:
    """Why these kernels cannot run here; None if they can."""
    rebuild = "run `python -m kvir.kernels.cpu.build` (needs g++ or clang++)"
    if _ops is not None:
        # An extension of other sources takes its arguments in another order.
        compiled = getattr(_ops, "SOURCES", None)
        return None if compiled == sources_digest() else f"compiled from other sources; {rebuild}"
    built = Path(__file__).with_name(f"_ops{sysconfig.get_config_var('EXT_SUFFIX')}")
    if built.exists():
        return f"{built} does not load: {_missing}"
    return f"not compiled; {rebuild}"


def isas() -> list[str]:
    """Instruction sets that run on this machine, best first; the first is used."""
    return _ops.isas()


def use_isa(name: str) -> str:
    """Use another of `isas()` from now on, in the whole process; returns the name of the one used before."""
    return _ops.use_isa(name)


def use_torch_threads(yes: bool = True) -> bool:
    """Run on torch's OpenMP pool, or on a pool of our own.  Returns whether torch has one to be used."""
    address = _gomp_parallel()
    _ops.use_gomp(address if yes else 0)
    return address != 0


def stream_read(buffer: Tensor) -> None:
    """Read a contiguous tensor from end to end on all threads: the speed to compare with."""
    assert buffer.is_contiguous()
    _ops.stream_read(buffer.data_ptr(), buffer.nbytes, get_num_threads())


def append(k: Tensor, v: Tensor, cache: Cache, slots: Tensor, unit0: int) -> None:
    """`kernels.ops.Append`."""
    kv = cache.kv
    tokens, kv_heads, head_dim = k.shape
    k_token, k_head, k_last = k.stride()
    v_token, v_head, v_last = v.stride()
    if (
        not (k.dtype is v.dtype is kv.dtype)
        or k_last != 1
        or v_last != 1
        or v.shape != k.shape
        or head_dim != kv.shape[3]
        or slots.dtype is not torch.int64
        or slots.shape[0] != tokens
        or not slots.is_contiguous()
    ):
        _refuse(k=k, v=v, kv=kv, slots=slots)
    _ops.append(
        k.data_ptr(), k_token, k_head, v.data_ptr(), v_token, v_head, *_cache(cache, unit0 + kv_heads),
        slots.data_ptr(), tokens, kv_heads, unit0, kv.element_size(), get_num_threads(),
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
    """`kernels.ops.AttendDecode`."""
    batch, query_heads, head_dim = q.shape
    q_batch, q_head, q_last = q.stride()
    out_batch, out_head, out_last = out.stride()
    page_stride, page_last = pages.stride()
    dtype = q.dtype
    if (
        not (dtype is cache.kv.dtype is out.dtype)
        or dtype not in DTYPES
        or q_last != 1
        or out_last != 1
        or page_last != 1
        or out.shape != q.shape
        or head_dim != cache.kv.shape[3]
        or head_dim % 8 != 0
        or query_heads % kv_heads != 0
        or not (pages.dtype is lens.dtype is torch.int32)
        or pages.shape[0] != batch
        or lens.shape[0] != batch
        or not lens.is_contiguous()
        or scale <= 0
    ):
        _refuse(q=q, kv=cache.kv, out=out, pages=pages, lens=lens)
    return _ops.decode(
        q.data_ptr(), q_batch, q_head, out.data_ptr(), out_batch, out_head, *_cache(cache, unit0 + kv_heads),
        pages.data_ptr(), page_stride, pages.shape[1], lens.data_ptr(),
        *_bounds(bounds, unit0 + kv_heads, q.shape[0]),
        batch, query_heads, kv_heads, unit0, scale, logit_cap, DTYPES[dtype], get_num_threads(),
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
    tokens, query_heads, head_dim = q.shape
    kv_heads = k_new.shape[1]
    batch = prefix_lens.shape[0]
    q_token, q_head, q_last = q.stride()
    k_token, k_head, k_last = k_new.stride()
    v_token, v_head, v_last = v_new.stride()
    out_token, out_head, out_last = out.stride()
    page_stride, page_last = pages.stride()
    dtype = q.dtype
    if (
        not (dtype is k_new.dtype is v_new.dtype is cache.kv.dtype is out.dtype)
        or dtype not in DTYPES
        or not (q_last == k_last == v_last == out_last == page_last == 1)
        or out.shape != q.shape
        or k_new.shape != (tokens, kv_heads, head_dim)
        or v_new.shape != k_new.shape
        or head_dim != cache.kv.shape[3]
        or head_dim % 8 != 0
        or query_heads % kv_heads != 0
        or not (pages.dtype is prefix_lens.dtype is extend_lens.dtype is torch.int32)
        or pages.shape[0] != batch
        or extend_lens.shape[0] != batch
        or not prefix_lens.is_contiguous()
        or not extend_lens.is_contiguous()
        or sum(chunks := extend_lens.tolist()) != tokens
        or min(chunks, default=0) < 0
        or scale <= 0
    ):
        _refuse(q=q, k_new=k_new, v_new=v_new, kv=cache.kv, out=out, pages=pages, prefix_lens=prefix_lens,
                extend_lens=extend_lens)  # fmt: skip
    return _ops.extend(
        q.data_ptr(), q_token, q_head, k_new.data_ptr(), k_token, k_head, v_new.data_ptr(), v_token, v_head,
        out.data_ptr(), out_token, out_head, *_cache(cache, unit0 + kv_heads),
        pages.data_ptr(), page_stride, pages.shape[1], prefix_lens.data_ptr(), extend_lens.data_ptr(),
        *_bounds(bounds, unit0 + kv_heads),
        batch, query_heads, kv_heads, unit0, scale, logit_cap, DTYPES[dtype], get_num_threads(),
    )  # fmt: skip


def _cache(cache: Cache, units: int) -> tuple[int, ...]:
    """The pool and the table as `_ops` takes them; units [0, `units`) must exist."""
    kv, table = cache.kv, cache.table
    head_pages, two, page_rows, head_dim = kv.shape
    table_stride, table_last = table.stride()
    if (
        two != 2
        or not kv.is_contiguous()
        or table.dtype is not torch.int32
        or table_last != 1
        or units > table.shape[1]
        or kv.device.type != "cpu"
    ):
        _refuse(kv=kv, table=table)
    bias = cache.bias
    if bias is not None and (
        bias.dtype is not torch.float32 or bias.shape != (head_pages, page_rows) or not bias.is_contiguous()
    ):
        _refuse(kv=kv, bias=bias)
    biases = 0 if bias is None else bias.data_ptr()
    places = kv.data_ptr(), biases, table.data_ptr(), table_stride
    return *places, head_pages, table.shape[0], page_rows, head_dim


def _bounds(bounds: Bounds, units: int, batch: int = 0) -> tuple[int, int, int]:
    """Addresses and the stride between requests: 0 unless each of `batch` requests has bounds of its own."""
    sink, recent = bounds.sink, bounds.recent
    shape = sink.shape
    if (
        not (sink.dtype is recent.dtype is torch.int32)
        or recent.shape != shape
        or shape[-1] < units
        or (len(shape) != 1 and shape[:-1] != (batch,))
        or not sink.is_contiguous()
        or not recent.is_contiguous()
    ):
        _refuse(sink=sink, recent=recent)
    return sink.data_ptr(), recent.data_ptr(), shape[1] if len(shape) == 2 else 0


def _refuse(**tensors: Tensor) -> None:
    given = ", ".join(f"{name} {x.dtype} {list(x.shape)} strides {x.stride()}" for name, x in tensors.items())
    raise ValueError(f"arguments do not fit the contract in kernels/ops.py (scale must be positive): {given}")


def _gomp_parallel() -> int:
    """The address of the GOMP_parallel that torch's own operators call; 0 if it uses none.

    torch carries its own libgomp, and two OpenMP pools in one process fight for the cores.  Looking the
    symbol up through libtorch_cpu finds exactly the one that this library is linked to.
    """
    for name in ("libtorch_cpu.so", "libtorch.so"):
        path = Path(torch.__file__).parent / "lib" / name
        if path.exists():
            try:
                library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
                return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
            except (OSError, AttributeError):
                continue
    return 0


KERNELS = Kernels(name="cpu", append=append, attend_decode=attend_decode, attend_extend=attend_extend)

if _ops is not None:
    use_torch_threads()
