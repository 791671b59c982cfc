"""Kernels by name.  A module is imported when its name is asked for."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any

from kvir.kernels.copy_ops import CopyKernels
from kvir.kernels.ops import Kernels
from kvir.kernels.score_ops import SumKernels

# A module here has `KERNELS`; where it may be unusable also `available() -> str | None`, None or the reason.
MODULES = {
    "ref": "kvir.kernels.ref.ops",
    "cpu": "kvir.kernels.cpu.ops",
    "triton": "kvir.kernels.triton.ops",
}
SUM_MODULES = {"ref": "kvir.kernels.ref.score_running", "triton": "kvir.kernels.triton.sums"}
COPY_MODULES = {"ref": "kvir.kernels.ref.compact", "triton": "kvir.kernels.triton.compact"}
FALLBACK = "ref"

log = logging.getLogger(__name__)


class KernelsUnavailable(RuntimeError):
    """The kernels asked for cannot run here."""


def unavailable(name: str) -> str | None:
    """Why the kernels called `name` cannot run here; None if they can.  ValueError for a name nobody has."""
    if name not in MODULES:
        raise ValueError(f"no kernels called {name!r}; there are: {', '.join(sorted(MODULES))}")
    module = import_module(MODULES[name])
    return module.available() if hasattr(module, "available") else None


def get(name: str) -> Kernels:
    """The kernels called `name`.

    Raises ValueError for a name nobody has, KernelsUnavailable if they cannot run here.
    """
    reason = unavailable(name)
    if reason is not None:
        raise KernelsUnavailable(f"kernels {name!r} cannot run here: {reason}")
    return import_module(MODULES[name]).KERNELS


def choose(preferred: str) -> Kernels:
    """The kernels called `preferred`, or the reference, with one log line that says why."""
    reason = unavailable(preferred)
    if reason is None:
        return get(preferred)
    log.warning("kernels %r cannot run here (%s); using %r, which is slow", preferred, reason, FALLBACK)
    return get(FALLBACK)


def sums(preferred: str) -> SumKernels:
    """The sums over all queries of the kernels called `preferred`, or the reference's."""
    return _part(SUM_MODULES, preferred).SUMS


def copies(preferred: str) -> CopyKernels:
    """The copies that a selection makes, of the kernels called `preferred`, or the reference's."""
    return _part(COPY_MODULES, preferred).COPIES


def _part(modules: dict[str, str], preferred: str) -> Any:
    usable = preferred in modules and unavailable(preferred) is None
    return import_module(modules[preferred if usable else FALLBACK])
