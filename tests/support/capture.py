"""A stand-in for CUDA graphs: what a captured step would replay, replayed on a CPU.

While a step is captured nothing runs.  Launches are written down with their arguments, and torch may make
views and fresh memory but compute nothing and read nothing: a graph would not follow that.  A replay runs the
launches as they were written down, so whatever changes between steps must reach them through memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

HARMLESS = {"empty", "view", "slice", "select", "as_strided", "detach", "alias", "_unsafe_view", "expand"}


@dataclass(frozen=True)
class Launch:
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    def facts(self, fresh: set[int]) -> tuple[Any, ...]:
        """What a graph fixes: grid, numbers, and where tensors lie; not so of memory that was made inside."""

        def fact(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            place = "fresh" if value.data_ptr() in fresh else value.data_ptr()
            return (place, tuple(value.shape), value.stride(), value.dtype)

        keywords = str(sorted(self.keywords.items()))
        return (self.kernel.fn.__name__, self.grid, tuple(map(fact, self.arguments)), keywords)


class NoComputing(TorchDispatchMode):
    """Refuses what a graph could not follow; notes memory that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in HARMLESS:
            raise AssertionError(f"{name} in a captured step")
        out = func(*args, **(kwargs or {}))
        if name == "empty":
            self.fresh.add(out.data_ptr())
        return out


@contextmanager
def capturing() -> Iterator[tuple[list[Launch], NoComputing]]:
    from triton.runtime.interpreter import InterpretedFunction

    launches: list[Launch] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(self, tuple(grid), args, kwargs))

    mode = NoComputing()
    with mock.patch.object(InterpretedFunction, "run", note), mode:
        yield launches, mode


def replay(launches: list[Launch]) -> None:
    for launch in launches:
        launch.kernel.run(*launch.arguments, grid=launch.grid, warmup=False, **launch.keywords)
