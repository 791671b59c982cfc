"""Compile `kvir.kernels.cpu._ops`: `python -m kvir.kernels.cpu.build` puts it beside this file.

`setup.py` uses the same `build`.  One C++ file is compiled once per instruction set; at run time the best one
that the CPU has is taken.  The compiler is $CXX, else c++, g++ or clang++.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
FLAGS = (
    "-std=c++17",
    "-O3",
    "-g0",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
)
# The headers of the compiler's own intrinsics trip these warnings.
FLAGS += ("-Wno-unknown-warning-option", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
# Products and sums are fused where the code says so.  The plainest kernels leave it to the compiler.
UNFUSED = ("-ffp-contract=off",)
# The plainest comes first: where the linker merges copies of an inline function, it keeps the first.
X86_ISAS = {
    "generic": (),
    "avx2": (*UNFUSED, "-mavx2", "-mfma", "-mf16c"),
    "avx512": (*UNFUSED, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
    "avx512bf16": (
        *UNFUSED,
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mavx512dq",
        "-mavx512bf16",
        "-mfma",
        "-mf16c",
    ),
}
OTHER_ISAS: dict[str, tuple[str, ...]] = {"generic": ()}
PLAIN_SOURCES = ("module.cpp", "parallel.cpp", "append.cpp")
SOURCES = (*PLAIN_SOURCES, "isa.cpp")


class BuildError(RuntimeError):
    """There is no compiler, or it failed; the message carries what it said."""


def sources_digest() -> str:
    """A digest of what the extension is compiled from; the extension carries that of its own."""
    digest = hashlib.sha256()
    for path in sorted((*HERE.glob("*.cpp"), *HERE.glob("*.h"), HERE / "build.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build(target: Path) -> None:
    """Compile the extension module into the file `target`; it appears whole or not at all."""
    compiler = _compiler()
    isas = X86_ISAS if platform.machine().lower() in ("x86_64", "amd64") else OTHER_ISAS
    with tempfile.TemporaryDirectory(prefix="kvir-build-") as folder:
        digest = f'-DKVIR_SOURCES="{sources_digest()}"'
        jobs = [(HERE / name, Path(folder) / f"{name}.o", (digest,)) for name in PLAIN_SOURCES]
        jobs += [
            (HERE / "isa.cpp", Path(folder) / f"isa-{isa}.o", (f"-DKVIR_ISA={isa}", *flags))
            for isa, flags in isas.items()
        ]
        include = f"-I{sysconfig.get_path('include')}"
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compile_jobs = [
                pool.submit(_run, [*compiler, *FLAGS, *flags, include, "-c", str(source), "-o", str(out)])
                for source, out, flags in jobs
            ]
            for job in compile_jobs:
                job.result()
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            objects = [str(out) for _, out, _ in jobs]
            _run([*compiler, "-shared", "-pthread", *objects, "-o", str(unfinished)])
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)


def _compiler() -> list[str]:
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler: install g++ or clang++, or set CXX")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")
    sys.stderr.write(done.stderr)


def main() -> int:
    target = HERE / f"_ops{sysconfig.get_config_var('EXT_SUFFIX')}"
    try:
        build(target)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
