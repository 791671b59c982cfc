"""Records of SGLang that a compiled decode step makes: as dataclasses torch can trace them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import msgspec
import pytest
import torch

from kvir.sglang_ext import traceable
from kvir.sglang_ext.traceable import RECORDS, as_dataclass, make_traceable


@pytest.fixture
def restored() -> Iterator[None]:
    before = [(import_module(path), name, getattr(import_module(path), name)) for path, name in RECORDS]
    yield
    for module, name, record in before:
        setattr(module, name, record)


class Left(msgspec.Struct):
    value: Any
    update: Any
    owed: list[int] = msgspec.field(default_factory=list)

    def release(self) -> None:
        self.value = None


def test_fields_defaults_and_methods_are_the_same() -> None:
    made: Any = as_dataclass(Left)
    one, other = made(1, 2), made(3, update=4, owed=[5])
    assert (one.value, one.update, one.owed) == (1, 2, [])
    assert (other.value, other.update, other.owed) == (3, 4, [5])
    assert one.owed is not made(1, 2).owed
    one.release()
    assert one.value is None


def traced(record: Any) -> int:
    """Graph breaks of a function that makes one."""

    def layer(x: torch.Tensor) -> torch.Tensor:
        left = record(x + 1, None)
        left.release()
        return x * 2

    torch._dynamo.reset()
    found: Any = torch._dynamo.explain(layer)(torch.ones(2))
    return found.graph_break_count


def test_torch_traces_the_dataclass_alone() -> None:
    assert traced(Left) > 0  # else SGLang's own would do
    assert traced(as_dataclass(Left)) == 0


def test_sglang_has_them_and_gets_them(restored: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, name in RECORDS:
        assert issubclass(getattr(import_module(path), name), msgspec.Struct)
    make_traceable()
    for path, name in RECORDS:
        record = getattr(import_module(path), name)
        assert not issubclass(record, msgspec.Struct)
        make_traceable()
        assert getattr(import_module(path), name) is record
    stream: Any = import_module(RECORDS[0][0])
    residual = stream.ResidualStream()
    output = torch.ones(2)
    assert residual.record(output, Update()) is output
    assert residual.complete(output) is output
    residual.write(output)
    assert residual.pending is None
    monkeypatch.setattr(traceable, "RECORDS", ((RECORDS[0][0], "Elsewhere"),))
    with pytest.raises(RuntimeError, match="has no Elsewhere"):
        make_traceable()


class Update:
    bind = None
