"""SGLang on a CPU without its own CPU kernels.

SGLang 0.5.23 imports the module `sgl_kernel` on its CPU path, and no build of it for CPUs is on PyPI.
Everything that a dense decoder needs has a fallback, so an importable stand-in is enough: its attributes
raise when they are called.  It is put on the path only where no accelerator exists and the real module cannot
be imported.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "standin_modules"


def needed() -> bool:
    import torch

    if any(getattr(torch, kind).is_available() for kind in ("cuda", "xpu", "npu") if hasattr(torch, kind)):
        return False
    if in_use():
        return False
    try:
        importlib.import_module("sgl_kernel")
    except ImportError:
        for name in [m for m in sys.modules if m == "sgl_kernel" or m.startswith("sgl_kernel.")]:
            del sys.modules[name]
        return True
    return False


def in_use() -> bool:
    return str(FOLDER) in sys.path


def install() -> None:
    """For this process and the children it spawns."""
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if not needed():
        return
    sys.path.insert(0, str(FOLDER))
    rest = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{FOLDER}{os.pathsep}{rest}" if rest else str(FOLDER)
