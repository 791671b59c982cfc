"""Bytes and token counts as people write and read them."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?", re.IGNORECASE)
_COUNT = re.compile(r"(\d+)\s*(k|m)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """`2GiB` (powers of 1024), `2GB` (powers of 1000), `512M` (1024), `1000`.  Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"`{text}` is not a size; write 2GiB, 1.5GB or a number of bytes")
    number, prefix, unit = found.groups()
    base = 1000 if unit and unit.lower() == "b" and prefix else 1024
    return int(float(number) * base ** " kmgt".index(prefix.lower() or " "))


def parse_tokens(text: str) -> int:
    """`4096`, `4k` (4 x 1024), `1m`.  Raises ValueError."""
    found = _COUNT.fullmatch(text.strip())
    if found is None or not int(found[1]):
        raise ValueError(f"`{text}` is not a number of tokens; write 4096 or 4k")
    return int(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[(found[2] or "").lower()]


def human_bytes(count: int) -> str:
    """`1.50 GiB`; exact below 10 KiB."""
    if count < 10 * 1024:
        return f"{count:,} B"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
        value /= 1024
    return f"{value:,.2f} TiB"
