"""Typed access to a parsed `config.json`, which may hold anything."""

from __future__ import annotations

from typing import Any

from kvir.policy_ir.nodes import MAX_TOKENS

Config = dict[str, Any]


class Refused(Exception):
    """The config describes something that lowering cannot plan for."""

    def __init__(self, code: str, message: str, help: str) -> None:
        super().__init__(message)
        self.code, self.message, self.help = code, message, help


class Reader:
    """Reads fields with a family's defaults, and collects what is wrong, so that all of it is named at once.

    A default of None means that null and absence say the same; then `otherwise` is the value.
    """

    def __init__(self, text: Config, defaults: dict[str, int | None], arch: str) -> None:
        self._text, self._defaults, self._arch = text, defaults, arch
        self._wrong: list[str] = []

    def positive(self, name: str, *, otherwise: int | None = None, most: int = MAX_TOKENS) -> int:
        """A positive integer.  A required field that is missing or wrong reads as 1 until `finish`."""
        if name in self._text:
            value: object = self._text[name]
        elif name in self._defaults:
            value = self._defaults[name]
        else:
            return self._bad(f"`{name}`")
        if value is None and otherwise is not None:
            return otherwise
        if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most:
            return value
        return self._bad(f"`{name}` ({value!r})")

    def optional(self, name: str, *, least: int = 1) -> int | None:
        """An integer, or None if the field is null, or absent without a default."""
        value: object = self._text.get(name, self._defaults.get(name))
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_TOKENS:
            return value
        self._bad(f"`{name}` ({value!r})")
        return None

    def true(self, name: str) -> bool:
        return bool(self._text.get(name))

    def finish(self) -> None:
        """Raises Refused if any field was wrong."""
        if self._wrong:
            raise Refused(
                "KV202",
                f"config of `{self._arch}` lacks usable {', '.join(self._wrong)}",
                "each must be a positive integer, not too large",
            )

    def _bad(self, what: str) -> int:
        if what not in self._wrong:
            self._wrong.append(what)
        return 1
