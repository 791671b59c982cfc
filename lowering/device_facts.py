"""Devices as data: what the planner and the kernel choice need to know of them.  Nothing is probed.

Figures are those of the vendors' data sheets, whose bytes are decimal (SXM modules unless named otherwise).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

GB, TB = 10**9, 10**12
MIB, KIB = 1 << 20, 1 << 10

Kind = Literal["cpu", "cuda"]


class DeviceFacts(Struct, frozen=True, kw_only=True):
    """One device; None where it depends on the machine."""

    name: str
    kind: Kind  # what torch and the server call it
    arch: str
    multiprocessors: int | None = None
    memory_bytes: int | None = None
    bytes_per_second: int | None = None  # of its memory
    l2_bytes: int | None = None
    shared_bytes_per_block: int | None = None


def _card(name: str, arch: str, sms: int, memory: int, rate: int, l2: int, shared: int) -> DeviceFacts:
    return DeviceFacts(
        name=name,
        kind="cuda",
        arch=arch,
        multiprocessors=sms,
        memory_bytes=memory,
        bytes_per_second=rate,
        l2_bytes=l2,
        shared_bytes_per_block=shared,
    )


_ALL = (
    DeviceFacts(name="cpu", kind="cpu", arch="x86_64"),
    DeviceFacts(name="cuda", kind="cuda", arch="sm_80"),
    _card("a100-40gb", "sm_80", 108, 40 * GB, 1_555 * GB, 40 * MIB, 163 * KIB),
    _card("a100", "sm_80", 108, 80 * GB, 2_039 * GB, 40 * MIB, 163 * KIB),
    _card("h100-pcie", "sm_90", 114, 80 * GB, 2_039 * GB, 50 * MIB, 227 * KIB),
    _card("h100", "sm_90", 132, 80 * GB, 3_350 * GB, 50 * MIB, 227 * KIB),
    _card("h200", "sm_90", 132, 141 * GB, 4_800 * GB, 50 * MIB, 227 * KIB),
    _card("b200", "sm_100", 148, 180 * GB, 8 * TB, 126 * MIB, 227 * KIB),
)
DEVICES: dict[str, DeviceFacts] = {device.name: device for device in _ALL}


def card_named(name: str) -> str:
    """The device that a vendor's name tells of: `NVIDIA H100 80GB HBM3` -> h100; `cuda` for an unknown card.

    All words of the device's own name stand in the vendor's; of several such devices the longest name is
    meant.
    """
    words = set(name.lower().replace("-", " ").split())
    known = (device for device in DEVICES if words.issuperset(device.split("-")))
    return max(known, key=len, default="cuda")


UNKNOWN_MULTIPROCESSORS = 108  # of a card that the plan does not know: an A100's


def multiprocessors(device: DeviceFacts) -> int:
    """How many a device has, or is taken to have; a CPU has none."""
    return 0 if device.kind == "cpu" else device.multiprocessors or UNKNOWN_MULTIPROCESSORS
