"""Records of SGLang that torch can trace.

SGLang 0.5.23 keeps what a layer leaves to the next one in `msgspec.Struct`s.  torch.compile cannot make one,
so each of them would end its graph, four times a layer, and the compiled step would be slower than the plain
one.  While the model is compiled, and in its graph, they are dataclasses with the same fields and methods.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import Any

import msgspec

BOUNDARY = "sglang.srt.layers.layer_boundary."
RECORDS = ((BOUNDARY + "residual.stream", "Contribution"), (BOUNDARY + "exit", "ExitDecision"))


def make_traceable() -> None:
    """Replace them, once per process, before anything is compiled.

    Raises RuntimeError if SGLang has no such record: it is another SGLang than kvir knows.
    """
    for path, name in RECORDS:
        module: Any = import_module(path)
        record = getattr(module, name, None)
        if record is None:
            raise RuntimeError(f"kvir: {path} has no {name}")
        if issubclass(record, msgspec.Struct):
            setattr(module, name, as_dataclass(record))


def as_dataclass(record: type[msgspec.Struct]) -> type:
    """A class with the fields, defaults and methods of a record."""
    fields: list[Any] = []
    for each in msgspec.structs.fields(record):
        if each.default_factory is not msgspec.NODEFAULT:
            fields.append((each.name, Any, dataclasses.field(default_factory=each.default_factory)))
        elif each.default is not msgspec.NODEFAULT:
            fields.append((each.name, Any, dataclasses.field(default=each.default)))
        else:
            fields.append((each.name, Any))
    methods = {
        name: value for name, value in vars(record).items() if callable(value) and not name.startswith("__")
    }
    return dataclasses.make_dataclass(
        record.__name__, fields, namespace=methods, frozen=record.__struct_config__.frozen
    )
