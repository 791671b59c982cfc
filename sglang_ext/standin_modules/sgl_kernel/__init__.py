"""Stand-in for sgl_kernel on a CPU: importable, and every function raises when it is called (see
../standin.py).
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} does not exist on this CPU")

    missing.__name__ = name
    return missing
