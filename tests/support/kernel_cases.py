"""Attention problems with a paged, ragged cache, and their dense answer in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvir.kernels.ops import FULL, Bounds, Cache, Kernels

LAYERS = 3  # the ops work on the middle one
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Shape:
    """What a problem looks like; every request is (rows in the cache before the chunk, rows of the chunk)."""

    requests: tuple[tuple[int, int], ...]
    windows: tuple[tuple[int, int], ...]  # (sink, recent) per KV head
    group: int = 1
    head_dim: int = 64
    page_rows: int = 16
    dtype: torch.dtype = torch.float32
    logit_cap: float = 0.0
    strided: bool = False
    seed: int = 0

    def __str__(self) -> str:
        windows = "+".join(f"{s}/{'full' if r == FULL else r}" for s, r in self.windows)
        requests = "+".join(f"{a},{b}" for a, b in self.requests)
        dtype = str(self.dtype).removeprefix("torch.")
        flags = f"{'-cap' if self.logit_cap else ''}{'-strided' if self.strided else ''}"
        return f"{dtype}-D{self.head_dim}-G{self.group}-P{self.page_rows}-[{windows}]-[{requests}]{flags}"


@dataclass(frozen=True)
class Problem:
    """One problem.  The last chunk of every request is fresh for `extend`, and in the cache for `decode`."""

    shape: Shape
    history_k: tuple[Tensor, ...]  # per request [rows, Hkv, D]
    history_v: tuple[Tensor, ...]
    q: Tensor  # [T, Hq, D]
    k_new: Tensor  # [T, Hkv, D]
    v_new: Tensor
    cache: Cache
    pages: Tensor
    bounds: Bounds
    unit0: int
    scale: float

    @property
    def kv_heads(self) -> int:
        return len(self.shape.windows)

    @property
    def prefix_lens(self) -> Tensor:
        return torch.tensor([a for a, _ in self.shape.requests], dtype=torch.int32)

    @property
    def extend_lens(self) -> Tensor:
        return torch.tensor([b for _, b in self.shape.requests], dtype=torch.int32)

    @property
    def lens(self) -> Tensor:
        return self.prefix_lens + self.extend_lens


def make(shape: Shape, *, chunk_in_cache: bool) -> Problem:
    """A random problem whose cache holds exactly the rows that some query sees.

    Every other row of the pool is NaN, and pages outside the windows are absent or lead to NaN.

    `chunk_in_cache`: the queries' own rows are in the cache too (decode), or not (extend).
    """
    rng = np.random.default_rng(shape.seed)
    torch.manual_seed(shape.seed)
    heads, page_rows, head_dim = len(shape.windows), shape.page_rows, shape.head_dim
    tokens = sum(extend for _, extend in shape.requests)
    units, unit0 = LAYERS * heads, heads
    page_counts = [-(-(prefix + extend) // page_rows) for prefix, extend in shape.requests]
    logical_pages = sum(page_counts) + 3
    head_pages = sum(page_counts) * heads + 5

    kv = torch.full((head_pages, 2, page_rows, head_dim), torch.nan, dtype=shape.dtype)
    table = np.full((logical_pages, units), -1, dtype=np.int32)
    pages = rng.integers(0, logical_pages, (len(shape.requests), max(page_counts) + 1)).astype(np.int32)
    free_logical = list(rng.permutation(logical_pages))
    free_physical = list(rng.permutation(head_pages))
    histories_k, histories_v = [], []
    for b, (prefix, extend) in enumerate(shape.requests):
        history = torch.randn(2, prefix + extend, heads, head_dim).to(shape.dtype)
        histories_k.append(history[0])
        histories_v.append(history[1])
        pages[b, : page_counts[b]] = [free_logical.pop() for _ in range(page_counts[b])]
        cached = prefix + extend if chunk_in_cache else prefix
        for head, (sink, recent) in enumerate(shape.windows):
            first_query = max(prefix, 0) if not chunk_in_cache else prefix + extend - 1
            seen = [j for j in range(cached) if extend and (j < sink or j > first_query - recent)]
            for index in range(page_counts[b]):
                rows = [j for j in seen if j // page_rows == index]
                # A page that nobody may read leads nowhere, or into a page of NaN.
                if not rows and rng.random() < 0.5:
                    continue
                physical = free_physical.pop()
                table[pages[b, index], unit0 + head] = physical
                for j in rows:
                    kv[physical, 0, j % page_rows] = history[0, j, head]
                    kv[physical, 1, j % page_rows] = history[1, j, head]
    # Other layers' columns must not matter.
    table[:, :unit0] = rng.integers(-1, head_pages, (logical_pages, unit0))
    table[:, unit0 + heads :] = rng.integers(-1, head_pages, (logical_pages, units - unit0 - heads))

    query_heads = heads * shape.group
    width = (query_heads + 2 * heads) * head_dim
    fused = torch.randn(tokens, width + (24 if shape.strided else 0)).to(shape.dtype)[:, :width]
    q, k_new, v_new = fused.split([query_heads * head_dim, heads * head_dim, heads * head_dim], dim=1)
    start = 0
    for b, (prefix, extend) in enumerate(shape.requests):
        k_new[start : start + extend] = histories_k[b][prefix:].flatten(1)
        v_new[start : start + extend] = histories_v[b][prefix:].flatten(1)
        start += extend
    q, k_new, v_new = (
        x.reshape(tokens, n, head_dim) if shape.strided else x.reshape(tokens, n, head_dim).contiguous()
        for x, n in ((q, query_heads), (k_new, heads), (v_new, heads))
    )
    sink = torch.full((units,), 7, dtype=torch.int32)
    recent = torch.full((units,), 3, dtype=torch.int32)
    sink[unit0 : unit0 + heads] = torch.tensor([s for s, _ in shape.windows], dtype=torch.int32)
    recent[unit0 : unit0 + heads] = torch.tensor([r for _, r in shape.windows], dtype=torch.int32)
    return Problem(
        shape, tuple(histories_k), tuple(histories_v), q, k_new, v_new, Cache(kv, torch.from_numpy(table)),
        torch.from_numpy(pages), Bounds(sink, recent), unit0, head_dim**-0.5,
    )  # fmt: skip


def answer(problem: Problem) -> Tensor:
    """float64 [T, Hq, D]: softmax over the whole history under a dense mask, query by query."""
    shape = problem.shape
    out = torch.zeros(problem.q.shape, dtype=torch.float64)
    token = 0
    for b, (prefix, extend) in enumerate(shape.requests):
        for position in range(prefix, prefix + extend):
            for head, (sink, recent) in enumerate(shape.windows):
                keep = np.array([j < sink or j > position - recent for j in range(position + 1)], dtype=bool)
                if not keep.any():
                    continue
                k = problem.history_k[b][: position + 1, head].double().numpy()
                v = problem.history_v[b][: position + 1, head].double().numpy()
                for g in range(head * shape.group, (head + 1) * shape.group):
                    logits = k @ problem.q[token, g].double().numpy() * problem.scale
                    if shape.logit_cap:
                        logits = shape.logit_cap * np.tanh(logits / shape.logit_cap)
                    weights = np.where(keep, np.exp(logits - logits[keep].max()), 0.0)
                    out[token, g] = torch.from_numpy(weights @ v / weights.sum())
            token += 1
    return out


def decode(kernels: Kernels, p: Problem, **changes: object) -> tuple[Tensor, int]:
    """(out, holes) of `attend_decode`; the problem's requests must have chunks of 1."""
    p = replace(p, **changes) if changes else p
    out = _output(p)
    holes = kernels.attend_decode(
        p.q, p.cache, p.pages, p.lens, p.bounds, p.unit0, p.kv_heads, p.scale, p.shape.logit_cap, out
    )
    return out, holes


def extend(kernels: Kernels, p: Problem, **changes: object) -> tuple[Tensor, int]:
    """(out, holes) of `attend_extend`."""
    p = replace(p, **changes) if changes else p
    out = _output(p)
    holes = kernels.attend_extend(
        p.q, p.k_new, p.v_new, p.cache, p.pages, p.prefix_lens, p.extend_lens, p.bounds, p.unit0, p.scale,
        p.shape.logit_cap, out,
    )  # fmt: skip
    return out, holes


def error(got: Tensor, wanted: Tensor) -> float:
    """The largest difference; infinite if anything is NaN."""
    if got.numel() == 0:
        return 0.0
    difference = (got.double() - wanted.double()).abs().max().item()
    return float("inf") if np.isnan(difference) else difference


def close(got: Tensor, wanted: Tensor) -> bool:
    """Within the tolerance of the type, relative to values above 1."""
    largest = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    return error(got, wanted) < TOLERANCE[got.dtype] * largest


def ones(*lens: int) -> tuple[tuple[int, int], ...]:
    """Decode problems: requests of these lengths."""
    return tuple((length - 1, 1) for length in lens)


def _output(p: Problem) -> Tensor:
    # Filled with NaN, and strided, so that a row that is not written, or written elsewhere, shows.
    columns = p.q.shape[2] + (8 if p.shape.strided else 0)
    return torch.full((*p.q.shape[:2], columns), torch.nan, dtype=p.q.dtype)[..., : p.q.shape[2]]
