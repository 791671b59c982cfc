"""The one error that users see before a server starts."""

from __future__ import annotations


class KvirError(ValueError):
    """The message is complete: what is wrong, where, and what to write instead."""
