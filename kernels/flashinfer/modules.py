"""FlashInfer's modules, compiled ahead of time for a GPU that need not be here.

FlashInfer compiles C++ when a module is first called for, minutes for one of prefill.  `build` has it compile
those that `prefill.Prefill` will call for, and keeps them; `install` tells FlashInfer in a server of them, as
it is told of its own packages of modules.

    <folder>/flashinfer/modules.json       what was built, for which GPU, by which version
    <folder>/flashinfer/NAME/NAME.so

FlashInfer reads the GPU that it compiles for when it is imported, so it does so in a process of its own.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import torch

FOLDER, MANIFEST, FORMAT = "flashinfer", "modules.json", 1
PACKAGE = "flashinfer-python"
ARCHITECTURES = {"sm_80": "8.0", "sm_90": "9.0a", "sm_100": "10.0a"}  # as FlashInfer's variable wants them


class ModulesError(Exception):
    """Nothing was built; the text says why."""


@dataclass(frozen=True)
class PrefillFacts:
    """What the modules of a plan are compiled for."""

    head_dim: int
    dtype: str  # bfloat16 or float16
    logit_cap: bool = False


class BuiltModule(msgspec.Struct, frozen=True):
    name: str
    sha256: str


class Modules(msgspec.Struct, frozen=True):
    """The manifest."""

    format: int
    target: str
    flashinfer: str
    modules: list[BuiltModule]


# ---- which -------------------------------------------------------------------------------------------------


def specs(facts: PrefillFacts, target: str) -> list[Any]:
    """FlashInfer's descriptions of the modules that `prefill.Prefill` calls for on `target`.

    On sm_100 FlashInfer chooses among libraries for a chunk's own rows, by shapes; those compile when called.
    """
    modules = import_module("flashinfer.jit.attention.modules")
    dtype = getattr(torch, facts.dtype)
    dim, plain = facts.head_dim, 0  # no positions are encoded by the kernel
    shape = (dtype, dtype, dtype, torch.int32, dim, dim, plain, False, facts.logit_cap, False)
    # K and V of head-pages lie alike, so the prefix takes FlashInfer's primary module
    found = [modules._gen_batch_prefill_primary_module("fa2", *shape)]
    if target == "sm_90":
        found.append(modules.gen_batch_prefill_module("fa3", *shape))
    return [*found, import_module("flashinfer.jit.cascade").gen_cascade_module()]


# ---- building ----------------------------------------------------------------------------------------------


def build(facts: Sequence[PrefillFacts], target: str, folder: Path) -> Modules:
    """Compile into `folder`/flashinfer, which is replaced when everything is there.

    Raises ModulesError where FlashInfer, or a CUDA compiler that it can use, is missing or fails.
    """
    if find_spec("flashinfer") is None:
        raise ModulesError("the package flashinfer is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".flashinfer-") as name:
        work, made = Path(name), Path(name) / "made"
        command = [sys.executable, "-m", __name__, target, str(made), msgspec.json.encode(facts).decode()]
        done = subprocess.run(command, env=_environment(target, work), capture_output=True, text=True)
        if done.returncode:
            raise ModulesError(
                "FlashInfer did not compile: " + " ".join((done.stderr or done.stdout)[-800:].split())
            )
        manifest = read(made)
        shutil.rmtree(folder / FOLDER, ignore_errors=True)
        made.rename(folder / FOLDER)
    return manifest


def _environment(target: str, work: Path) -> Mapping[str, str]:
    """Where FlashInfer compiles, for what, with which compiler and libraries."""
    libraries = work / "lib"
    libraries.mkdir()
    # libcuda comes with a GPU's driver; it is only linked by name, so any library of that name does
    stub = [os.environ.get("CC", "cc"), "-shared", "-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull]
    subprocess.run([*stub, "-o", str(libraries / "libcuda.so")], check=True, capture_output=True)
    environment = dict(os.environ) | {
        "FLASHINFER_CUDA_ARCH_LIST": ARCHITECTURES[target],
        "FLASHINFER_WORKSPACE_BASE": str(work),
        "FLASHINFER_EXTRA_LDFLAGS": f"-L{libraries}",
    }
    packaged = _packaged_toolkit()
    toolkit = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or _installed_toolkit() or packaged
    if toolkit is None:
        raise ModulesError("FlashInfer needs nvcc: install a CUDA toolkit, or say where it is with CUDA_HOME")
    environment["CUDA_HOME"] = str(toolkit)
    if packaged is not None:
        # headers that a toolkit may lack (cuRAND's), after its own
        flags = f"-Xcompiler=-idirafter,{packaged / 'include'}"
        if toolkit == packaged:  # its compiler is newer than its headers
            flags += " -DCCCL_DISABLE_CTK_COMPATIBILITY_CHECK"
            for runtime in (packaged / "lib").glob("libcudart.so.*"):
                (libraries / "libcudart.so").symlink_to(runtime)
        environment["FLASHINFER_EXTRA_CUDAFLAGS"] = flags
    return environment


def _installed_toolkit() -> Path | None:
    """That of the machine; `nvcc` on the path may be a script that calls it."""
    found = [Path("/usr/local/cuda")]
    if (nvcc := shutil.which("nvcc")) is not None:
        found.append(Path(nvcc).resolve().parent.parent)
    return next(
        (place for place in found if (place / "bin/nvcc").is_file() and (place / "include").is_dir()), None
    )


def _packaged_toolkit() -> Path | None:
    """The CUDA compiler among Python's packages, of the version that torch was built with."""
    version = (torch.version.cuda or "").split(".")[0]
    spec = find_spec("nvidia")
    places = [] if spec is None else [Path(p) / f"cu{version}" for p in spec.submodule_search_locations or ()]
    return next((place for place in places if (place / "bin/nvcc").is_file()), None)


def _compile(target: str, into: Path, facts: Sequence[PrefillFacts]) -> None:
    """What the process of its own does."""
    core = import_module("flashinfer.jit.core")
    wanted = {spec.name: spec for each in facts for spec in specs(each, target)}
    core.build_jit_specs(list(wanted.values()), skip_prebuilt=False)
    built: list[BuiltModule] = []
    for name, spec in sorted(wanted.items()):
        (into / name).mkdir(parents=True)
        file = shutil.copy2(spec.jit_library_path, into / name / f"{name}.so")
        built.append(BuiltModule(name, hashlib.sha256(Path(file).read_bytes()).hexdigest()))
    manifest = Modules(FORMAT, target, metadata.version(PACKAGE), built)
    (into / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def read(folder: Path) -> Modules:
    return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Modules)


# ---- in a server -------------------------------------------------------------------------------------------


def install(folder: Path, target: str) -> str | None:
    """Let FlashInfer load what `build` left in `folder`; None, or why it will not.

    Raises ImportError where FlashInfer is not installed.
    """
    folder = (folder / FOLDER).absolute()
    if not (folder / MANIFEST).is_file():
        return f"{folder / MANIFEST} does not exist"
    found, version = read(folder), metadata.version(PACKAGE)
    if (found.format, found.target, found.flashinfer) != (FORMAT, target, version):
        return (
            f"{folder / MANIFEST} is for {found.target} and FlashInfer {found.flashinfer}, "
            f"not {target} and {version}"
        )
    broken = [m.name for m in found.modules if not _is_whole(folder / m.name / f"{m.name}.so", m)]
    if broken:
        return f"{folder}: {', '.join(broken)} is not what {MANIFEST} says"
    env: Any = import_module("flashinfer.jit.env")
    provider = env.AOTProvider(
        provider_id="kvir",
        distribution="kvir",
        version=version,
        jit_cache_dir=folder,
        cuda_architectures=frozenset({"sm" + ARCHITECTURES[target].replace(".", "")}),
        modules=frozenset(m.name for m in found.modules),
    )
    env.FLASHINFER_AOT_PROVIDERS = (provider, *env.FLASHINFER_AOT_PROVIDERS)
    return None


def _is_whole(file: Path, module: BuiltModule) -> bool:
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == module.sha256


if __name__ == "__main__":
    _compile(sys.argv[1], Path(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=list[PrefillFacts]))
