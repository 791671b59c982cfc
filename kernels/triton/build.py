"""Build every kernel that a model's attention asks for, ahead of time: binaries, and a manifest of what they
came to.

    <folder>/manifest.json   what was built, for which GPU, by which versions
    <folder>/cubin/          the binaries
    <folder>/cache/          the same in the form of Triton's own cache; `install` copies it there
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton
from torch import Tensor

from kvir.kernels.ops import Bounds, Cache
from kvir.kernels.triton import aot, ops, sums
from kvir.kernels.triton.compact import launch_compact
from kvir.kernels.triton.decoder import Decoder, Sizes
from kvir.kernels.triton.trigger import Nuclei, Trigger
from kvir.kernels.triton.work import empty_work, plan_work

MANIFEST = "manifest.json"
FORMAT = 1
TARGETS = {"sm_80": 80, "sm_90": 90, "sm_100": 100}


@dataclass(frozen=True)
class AttentionFacts:
    """What the kernels of a plan are compiled for."""

    kv_heads: int
    query_heads: int
    head_dim: int
    page_rows: int
    dtype: torch.dtype
    logit_cap: bool = False
    selects: bool = False  # rows by score
    batches: tuple[int, ...] = (1,)  # of decode graphs


class BuiltKernel(msgspec.Struct, frozen=True):
    """A kernel in the manifest.  Bytes and registers are those of `aot.Built`."""

    kernel: str
    file: str  # in the folder
    sha256: str
    constants: dict[str, int | float | bool | str | None]
    warps: int
    stages: int
    registers: int
    shared_bytes: int
    stack_bytes: int
    async_loads: int
    matrix_products: int
    blocks: int


class Manifest(msgspec.Struct, frozen=True):
    """What a folder holds."""

    format: int
    target: str
    triton: str
    kernels: list[BuiltKernel]


def launch_everything(facts: AttentionFacts) -> None:
    """Call every launch that a server with this model makes, once per variant, on small tensors."""
    heads, group = facts.kv_heads, facts.query_heads // facts.kv_heads
    dim, cap = facts.head_dim, 30.0 if facts.logit_cap else 0.0
    q = torch.empty((2, facts.query_heads, dim), dtype=facts.dtype)
    k = torch.empty((2, heads, dim), dtype=facts.dtype)
    kv = torch.empty((4, 2, facts.page_rows, dim), dtype=facts.dtype)
    cache = Cache(kv, torch.zeros((4, heads), dtype=torch.int32))
    ints = torch.zeros(heads, dtype=torch.int32)
    lens, pages = torch.zeros(2, dtype=torch.int32), torch.zeros((2, 4), dtype=torch.int32)
    bounds, holes = Bounds(ints, ints), torch.zeros(1, dtype=torch.int32)
    slots = torch.zeros(2, dtype=torch.int64)
    ops.append(k, k, cache, slots, 0)
    tile = ops.tile_of_decode(q, heads)
    for batch in facts.batches:
        plan_work(
            empty_work(1, batch * heads, 64, "cpu"), torch.zeros(batch, dtype=torch.int32), bounds, heads,
            tile.rows,
        )  # fmt: skip
    work = empty_work(1, 2 * heads, 64, "cpu")
    partials = ops.empty_partials(work, group, dim)
    ops.launch_decode(q, cache, pages, lens, bounds, work, 0, partials, heads, 1.0, cap, q, holes)
    ops.launch_extend(q, k, k, cache, pages, lens, lens, bounds, 0, 1.0, cap, q, holes)
    if facts.selects:
        lse = torch.empty((2, facts.query_heads), dtype=torch.float32)
        ops.launch_extend(q, k, k, cache, pages, lens, lens, bounds, 0, 1.0, cap, q, holes, lse=lse)
        for how in ("mean", "max"):
            sums.window_columns(q, k, slots, 1.0, how, logit_cap=cap)
        launch_compact(
            k, k, torch.zeros((heads, 2), dtype=torch.int64), ints, kv,
            torch.zeros((heads, 4), dtype=torch.int32),
        )  # fmt: skip
        _launch_trigger(facts, cache, q, slots, cap)


def _launch_trigger(facts: AttentionFacts, cache: Cache, q: Tensor, slots: Tensor, cap: float) -> None:
    """A step of decode that selects."""
    heads = facts.kv_heads
    ints = torch.zeros(heads, dtype=torch.int32)
    sizes = Sizes(2, 4, 2, 1, heads, facts.query_heads, facts.head_dim, facts.page_rows)
    decoder = Decoder(sizes, ops.tile_of_decode(q, heads), Bounds(ints, ints), "cpu")
    nuclei = Nuclei(ints, torch.zeros(heads, dtype=torch.float64), ints, ints)
    trigger = Trigger(decoder, nuclei, ring_rows=2, candidates=64, dtype=facts.dtype)
    decoder.plan(torch.zeros((2, 64), dtype=torch.int32), slots, slots)
    trigger.remember(0, q, slots, slots)
    trigger.select(cache, slots, 1.0, cap)


def build(facts: Sequence[AttentionFacts], target: str, folder: Path) -> Manifest:
    """Compile for `target` (a key of TARGETS) into `folder`, which is made; what is there already is kept."""
    (folder / "cubin").mkdir(parents=True, exist_ok=True)
    with _cache_in(folder / "cache"), aot.compiling(TARGETS[target]) as kernels:
        for each in facts:
            launch_everything(each)
    built = []
    for kernel in kernels:
        found = aot.inspect(kernel)
        digest = hashlib.sha256(found.cubin).hexdigest()
        file = f"cubin/{found.kernel}-{kernel.hash[:16]}.cubin"
        (folder / file).write_bytes(found.cubin)
        built.append(
            BuiltKernel(
                kernel=found.kernel,
                file=file,
                sha256=digest,
                constants={name: _plain(value) for name, value in sorted(found.constants.items())},
                warps=found.warps,
                stages=found.stages,
                registers=found.registers,
                shared_bytes=found.shared_bytes,
                stack_bytes=found.stack_bytes,
                async_loads=found.async_loads,
                matrix_products=found.matrix_products,
                blocks=found.blocks,
            )
        )
    built.sort(key=lambda each: (each.kernel, each.file))
    manifest = Manifest(FORMAT, target, triton.__version__, built)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    return manifest


def default_folder(policy: Path, target: str) -> Path:
    """Where a policy's kernels are built, and a server looks for them: `chat.sm_90` for `chat.ir`."""
    return policy.with_suffix(f".{target}")


def install(folder: Path, target: str) -> str | None:
    """Put what `build` made where Triton looks for it; None, or why nothing was installed."""
    path = folder / MANIFEST
    if not path.is_file():
        return f"{path} does not exist"
    manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    if (manifest.format, manifest.target, manifest.triton) != (FORMAT, target, triton.__version__):
        return (
            f"{path} is for {manifest.target} and Triton {manifest.triton}, "
            f"not {target} and {triton.__version__}"
        )
    into = Path(_cache_knobs().dir)
    for entry in (folder / "cache").iterdir():
        if not (into / entry.name).exists():
            shutil.copytree(entry, into / entry.name)
    return None


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    knobs = _cache_knobs()
    before = knobs.dir
    knobs.dir = str(folder.absolute())
    try:
        yield
    finally:
        knobs.dir = before


def _cache_knobs() -> Any:
    knobs: Any = getattr(triton, "knobs")  # noqa: B009  made on demand
    return knobs.cache


def _plain(value: Any) -> int | float | bool | str | None:
    return value if isinstance(value, int | float | bool | str) or value is None else str(value)
