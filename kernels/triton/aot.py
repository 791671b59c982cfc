"""Compile kernels for a GPU that is not here, and say what they came to.

The launch functions of `ops.py` are called as a server calls them, with small tensors in ordinary memory; a
stand-in for the driver says which GPU it is, and nothing is run.  So what is compiled is exactly what the
server will ask for, and Triton finds it in its cache by the same key.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kvir.kernels.triton.settings import INTERPRETED

WARP_LANES = 32
REGISTERS = 65_536  # of a multiprocessor, sm_80 to sm_100
MAX_WARPS = 64
SHARED_BYTES = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}  # of a multiprocessor
RESERVED_SHARED_BYTES = 1 << 10  # of a block
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass(frozen=True)
class Built:
    """A compiled kernel.  Bytes are those of one block."""

    kernel: str
    target: str
    constants: dict[str, Any]
    warps: int
    stages: int
    registers: int  # of a thread
    shared_bytes: int
    stack_bytes: int  # of a thread: registers that did not suffice
    async_loads: int  # instructions that copy 16 bytes to shared memory without waiting
    matrix_products: int  # tensor core instructions
    blocks: int  # that fit on a multiprocessor
    cubin: bytes


class _Driver:
    """Says which GPU is to be compiled for."""

    _numbers = count(1)

    def __init__(self, capability: int) -> None:
        self._number = next(self._numbers)
        self.target = GPUTarget("cuda", capability, WARP_LANES)

    def get_current_device(self) -> int:
        return self._number  # never the same one: Triton keeps kernels in memory by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextmanager
def compiling(capability: int) -> Iterator[list[Any]]:
    """Inside, launches compile for `capability` (90 for sm_90) and run nothing; yields what was compiled."""
    if INTERPRETED:
        raise RuntimeError("kernels cannot be compiled in a process with TRITON_INTERPRET=1")
    found: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel: Any = run(self, *args, grid=grid, warmup=True, **kwargs)
        found[kernel.hash] = kernel
        return kernel

    kernels: list[Any] = []
    JITFunction.run = compile_only
    stand_in: Any = _Driver(capability)
    driver.set_active(stand_in)
    try:
        yield kernels
    finally:
        JITFunction.run = run
        driver._active = None
        kernels += found.values()


def inspect(kernel: Any) -> Built:
    """What the assembler made of a kernel, from its binary."""
    metadata, cubin = kernel.metadata, kernel.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _tool("--dump-resource-usage", file.name)
        code = _tool("-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of {metadata.name}: {usage[:200]}")
    registers, stack, local = map(int, found.groups())
    capability = metadata.target.arch
    return Built(
        kernel=metadata.name,
        target=f"sm_{capability}",
        constants=_constants(kernel),
        warps=metadata.num_warps,
        stages=metadata.num_stages,
        registers=registers,
        shared_bytes=metadata.shared,
        stack_bytes=max(stack, local),
        async_loads=len(re.findall(r"\bLDGSTS\.E\.BYPASS\S*128\b", code)),
        matrix_products=len(re.findall(r"\b[HU]G?MMA\b|\bUTC\w*MMA\b", code)),
        blocks=resident(registers, metadata.shared, metadata.num_warps, capability),
        cubin=cubin,
    )


def resident(registers: int, shared_bytes: int, warps: int, capability: int) -> int:
    """Blocks that fit on a multiprocessor at once."""
    of_warp = -(-registers * WARP_LANES // 256) * 256
    by_registers = REGISTERS // of_warp // warps
    by_shared = SHARED_BYTES[capability] // (shared_bytes + RESERVED_SHARED_BYTES)
    return min(by_registers, by_shared, MAX_WARPS // warps)


def _constants(kernel: Any) -> dict[str, Any]:
    names = kernel.src.fn.arg_names
    return {names[path[0]]: value for path, value in kernel.src.constants.items() if len(path) == 1}


def _tool(*arguments: str) -> str:
    return subprocess.run(
        [TOOLS / "cuobjdump", *arguments], check=True, capture_output=True, text=True
    ).stdout
