"""A second device for tests, on the CPU: tensors that say they are on a GPU, and mix with no others.

Their values are real, so what is computed there can be compared.  Where PyTorch would refuse an operation
because its tensors lie on two devices, or would not read one as an array, so does this; where it would make
the host wait for the device (a number is read, rows are counted), that is noted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_flatten

DEVICE = torch.device("cuda", 0)
# what may take tensors of both: copies, and indices, which PyTorch moves itself
BETWEEN = {"copy_", "__getitem__", "__setitem__", "_set_item", "index", "to", "new_tensor"}
WAITS = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu", "__len__"}
MOVES = {"to", "cpu", "cuda"}


class Elsewhere(Tensor):
    """A tensor of the second device; its memory is the host's."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Mode(TorchFunctionMode):
    """Sends factories with `device=` there, and counts what the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = _name(func)
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        there = any(isinstance(x, Elsewhere) for x in given)
        if there and name in WAITS and name != "__len__":
            self.waits[name] += 1
        if not there and name not in MOVES and _is_there(kwargs.get("device")):
            kwargs.pop("device")
            return move(func(*args, **kwargs))
        return _run(func, args, kwargs)


@contextmanager
def elsewhere() -> Iterator[_Mode]:
    """While it lasts, `DEVICE` is a device to make tensors on."""
    with _Mode() as mode:
        yield mode


def move(x: Tensor) -> Tensor:
    """The values of a tensor, there."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.detach().clone().as_subclass(Elsewhere)


def back(x: Tensor) -> Tensor:
    """The values of a tensor, here."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor).clone()


# ---- parts -------------------------------------------------------------------------------------------------


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = _name(func)
    given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    there = [x for x in given if isinstance(x, Elsewhere)]
    if there:
        if name == "__get__" and _property(func) == "device":
            return DEVICE
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        here = [x for x in given if not isinstance(x, Elsewhere)]
        if here and name not in BETWEEN and any(_dims(x) for x in here):
            raise RuntimeError(f"expected all tensors to be on the same device, in {name}")
        if name in ("__getitem__", "__setitem__") and not isinstance(args[0], Elsewhere):
            raise RuntimeError(f"a tensor of the host is indexed by, or filled from, the device, in {name}")
    if name in MOVES:
        return _moved(name, args, kwargs)
    if _is_there(kwargs.get("device")):
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
    with torch._C.DisableTorchFunctionSubclass():
        out = func(*args, **kwargs)
        return _as_there(out) if there else out


def _moved(name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
    x, rest = args[0], list(args[1:])
    target = {"cpu": torch.device("cpu"), "cuda": DEVICE}.get(name) or kwargs.pop("device", None)
    if target is None and rest and isinstance(rest[0], torch.device | str):
        target = rest.pop(0)
    if target is None and rest and isinstance(rest[0], Tensor):
        target = rest[0].device
        rest[0] = rest[0].dtype
    stays = isinstance(x, Elsewhere) if target is None else _is_there(target)
    with torch._C.DisableTorchFunctionSubclass():
        plain = x.as_subclass(Tensor)
        plain = plain.to(*rest, **kwargs) if rest or kwargs else plain
        if stays == isinstance(x, Elsewhere):
            return plain.as_subclass(Elsewhere) if stays else plain
        return plain.clone().as_subclass(Elsewhere) if stays else plain.clone()


def _as_there(out: Any) -> Any:
    if isinstance(out, Tensor):
        return out.as_subclass(Elsewhere)
    if isinstance(out, tuple) and hasattr(out, "_fields"):  # values and indices
        return type(out)(map(_as_there, out))
    if type(out) in (tuple, list):
        return type(out)(map(_as_there, out))
    if isinstance(out, tuple) and any(isinstance(x, Tensor) for x in out):  # a struct of torch.return_types
        return type(out)(tuple(map(_as_there, out)))
    return out


def _dims(x: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return x.dim()


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device).type == DEVICE.type


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _property(func: Any) -> str:
    name = resolve_name(func) or ""
    return name.split(".")[-2] if name.endswith("__get__") else ""
