"""How near the compiled kernels come to what the machine allows.

    OMP_NUM_THREADS=2 python bench/decode_kernel.py [--rounds 15] [--quick]

Decode: bytes of K and V that the visible rows of a layer occupy, over the time of the layer, against the
speed of reading as many bytes of a plain buffer in the same process.  The KV cache of all layers is larger
than the last-level cache, so is the buffer, and the head-pages are shuffled: it really comes from memory.
Prefill: against torch's causal scaled_dot_product_attention on the same chunk, keys and values repeated for
the query heads beforehand.  Runs are interleaved and medians compared.  It wants an idle machine: with two
threads, one that has to wait for a core holds up the other.  The best runs are shown too, for machines that
are not.

The last lines are for machines: `bench: decode_kernel_vs_stream = X` is the lowest ratio of the decode cases,
`bench: extend_vs_sdpa = X` the lowest speed-up of the prefill cases with full history.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvir.kernels.cpu import ops
from kvir.kernels.cpu.memory import aligned_empty
from kvir.kernels.ops import FULL, Bounds, Cache

PAGE_ROWS = 16
STREAM_BYTES = 256 << 20


@dataclass(frozen=True)
class Model:
    """The attention of a model."""

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int


SMALL = Model("9/3 heads of 64", 9, 3, 64)
LARGE = Model("32/8 heads of 128", 32, 8, 128)


@dataclass(frozen=True)
class DecodeCase:
    model: Model
    dtype: torch.dtype
    batch: int
    context_tokens: int
    layers: int
    windows: tuple[tuple[int, int], ...] = ((0, FULL),)  # (sink, recent) of the KV heads, repeated

    def __str__(self) -> str:
        kind = "full" if self.windows == ((0, FULL),) else "ragged"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.model.name}, {dtype}, batch {self.batch}, {self.context_tokens:,} tokens, {kind}"


RAGGED = ((4, 256), (0, FULL), (4, 1024))
DECODE = [
    DecodeCase(SMALL, torch.bfloat16, 8, 1024, 30),
    DecodeCase(SMALL, torch.float32, 8, 1024, 30),
    DecodeCase(SMALL, torch.bfloat16, 8, 4096, 12),
    DecodeCase(SMALL, torch.float32, 8, 4096, 8),
    DecodeCase(SMALL, torch.bfloat16, 8, 4096, 16, RAGGED),
    DecodeCase(SMALL, torch.float32, 8, 4096, 16, RAGGED),
    DecodeCase(LARGE, torch.bfloat16, 8, 1024, 6),
    DecodeCase(LARGE, torch.float32, 8, 1024, 4),
]


@dataclass(frozen=True)
class ExtendCase:
    model: Model
    dtype: torch.dtype
    tokens: int
    windows: tuple[tuple[int, int], ...] = ((0, FULL),)

    def __str__(self) -> str:
        kind = (
            "full"
            if self.windows == ((0, FULL),)
            else f"sink {self.windows[0][0]} + recent {self.windows[0][1]}"
        )
        return f"{self.model.name}, {str(self.dtype).removeprefix('torch.')}, {self.tokens:,} tokens, {kind}"


EXTEND = [
    ExtendCase(model, dtype, tokens, windows)
    for model, tokens in ((SMALL, 2048), (SMALL, 4096), (LARGE, 2048))
    for dtype in (torch.bfloat16, torch.float32)
    for windows in (((0, FULL),), ((4, 256),))
    if model is SMALL or windows == ((0, FULL),)
]


def bounds_of(windows: tuple[tuple[int, int], ...], units: int) -> Bounds:
    repeated = [windows[u % len(windows)] for u in range(units)]
    return Bounds(
        torch.tensor([s for s, _ in repeated], dtype=torch.int32),
        torch.tensor([r for _, r in repeated], dtype=torch.int32),
    )


def decode_layer(case: DecodeCase) -> tuple[Callable[[int], None], int]:
    """A function that runs decode of layer i, and the bytes of K and V that each has to read.

    Only pages with visible rows have head-pages, as in a running server.
    """
    model = case.model
    units = case.layers * model.kv_heads
    pages_each = -(-case.context_tokens // PAGE_ROWS)
    logical_pages = case.batch * pages_each
    bounds = bounds_of(case.windows, units)
    starts = (torch.arange(pages_each) * PAGE_ROWS)[:, None]
    resident = (starts < bounds.sink) | (starts + PAGE_ROWS > case.context_tokens - bounds.recent)
    resident = resident.repeat(case.batch, 1)
    windows = zip(bounds.sink.tolist(), bounds.recent.tolist(), strict=True)
    rows = sum(min(case.context_tokens, sink + recent) for sink, recent in windows)
    head_pages = int(resident.sum())
    kv = aligned_empty((head_pages, 2, PAGE_ROWS, model.head_dim), case.dtype).uniform_(-1, 1)
    table = torch.full((logical_pages, units), -1, dtype=torch.int32)
    table[resident] = torch.randperm(head_pages).to(torch.int32)
    pages = torch.arange(logical_pages, dtype=torch.int32).view(case.batch, pages_each)
    lens = torch.full((case.batch,), case.context_tokens, dtype=torch.int32)
    q = torch.randn(case.batch, model.query_heads, model.head_dim).to(case.dtype)
    out = torch.empty_like(q)
    cache = Cache(kv, table)
    scale = model.head_dim**-0.5

    def layer(i: int) -> None:
        unit0 = i % case.layers * model.kv_heads
        holes = ops.attend_decode(q, cache, pages, lens, bounds, unit0, model.kv_heads, scale, 0.0, out)
        assert holes == 0

    return layer, case.batch * rows * 2 * model.head_dim * case.dtype.itemsize // case.layers


def stream_piece(buffer: Tensor, size: int) -> Callable[[int], None]:
    """A function that reads piece i of the buffer, of `size` bytes."""
    pieces = [buffer[start : start + size] for start in range(0, len(buffer) - size + 1, size)]
    return lambda i: ops.stream_read(pieces[i % len(pieces)])


def extend_pair(case: ExtendCase) -> tuple[Callable[[int], None], Callable[[int], Tensor]]:
    """The prefill of one layer by our kernel, and by torch's attention without windows."""
    model = case.model
    q = torch.randn(case.tokens, model.query_heads, model.head_dim).to(case.dtype)
    k, v = (torch.randn(case.tokens, model.kv_heads, model.head_dim).to(case.dtype) for _ in range(2))
    out = torch.empty_like(q)
    cache = Cache(
        torch.empty(1, 2, PAGE_ROWS, model.head_dim, dtype=case.dtype),
        torch.full((1, model.kv_heads), -1, dtype=torch.int32),
    )
    pages, prefix = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    extends = torch.tensor([case.tokens], dtype=torch.int32)
    bounds = bounds_of(case.windows, model.kv_heads)
    scale = model.head_dim**-0.5
    group = model.query_heads // model.kv_heads
    qt = q.transpose(0, 1).unsqueeze(0).contiguous()
    kt, vt = (x.transpose(0, 1).repeat_interleave(group, 0).unsqueeze(0).contiguous() for x in (k, v))

    def ours(_: int = 0) -> None:
        ops.attend_extend(q, k, v, cache, pages, prefix, extends, bounds, 0, scale, 0.0, out)

    def torchs(_: int = 0) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(qt, kt, vt, is_causal=True)

    if case.windows == ((0, FULL),):
        ours()
        difference = (out.float() - torchs()[0].transpose(0, 1).float()).abs().max().item()
        assert difference < (1e-4 if case.dtype == torch.float32 else 5e-2), difference
    return ours, torchs


def interleaved(rounds: int, *functions: Callable[[int], object]) -> list[tuple[float, float]]:
    """Median and least seconds of each function, called with 0, 1, ...; they take turns."""
    times: list[list[float]] = [[] for _ in functions]
    for i in range(-1, rounds):  # call -1 warms up
        for function, into in zip(functions, times, strict=True):
            start = time.perf_counter()
            function(i)
            if i >= 0:
                into.append(time.perf_counter() - start)
    return [(statistics.median(x), min(x)) for x in times]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="only the first two cases of each kind")
    parser.add_argument("--isa", choices=ops.isas(), default=ops.isas()[0])
    args = parser.parse_args()
    ops.use_isa(args.isa)
    print(f"{args.isa}, {torch.get_num_threads()} threads, median of {args.rounds} rounds")

    buffer = aligned_empty((STREAM_BYTES,), torch.uint8).zero_()
    ratios = []
    for case in DECODE[:2] if args.quick else DECODE:
        layer, size = decode_layer(case)
        ours, stream = interleaved(args.rounds * case.layers, layer, stream_piece(buffer, size))
        ratios.append(stream[0] / ours[0])
        print(
            f"decode  {case}: {size / 1e6:.1f} MB a layer, {size / ours[0] / 1e9:.1f} GB/s, "
            f"stream {size / stream[0] / 1e9:.1f} GB/s, ratio {ratios[-1]:.2f} "
            f"(best {size / ours[1] / 1e9:.1f}, {size / stream[1] / 1e9:.1f}, {stream[1] / ours[1]:.2f})",
            flush=True,
        )
        del layer

    speedups = []
    for case in EXTEND[:2] if args.quick else EXTEND:
        ours, torchs = interleaved(args.rounds, *extend_pair(case))
        if case.windows == ((0, FULL),):
            speedups.append(torchs[0] / ours[0])
        flops = 2 * case.tokens**2 * case.model.query_heads * case.model.head_dim
        print(
            f"extend  {case}: {ours[0] * 1e3:.2f} ms, full causal SDPA {torchs[0] * 1e3:.2f} ms "
            f"({flops / torchs[0] / 1e9:.0f} GFLOP/s), speed-up {torchs[0] / ours[0]:.2f} "
            f"(best {ours[1] * 1e3:.2f}, {torchs[1] * 1e3:.2f}, {torchs[1] / ours[1]:.2f})",
            flush=True,
        )

    print(f"bench: decode_kernel_vs_stream = {min(ratios):.3f}")
    print(f"bench: extend_vs_sdpa = {min(speedups):.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
