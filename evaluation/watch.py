"""A running server's own account of its memory."""

from __future__ import annotations

from typing import Any

from evaluation.server import Server


def kvir_state(server: Server) -> dict[str, Any]:
    return server.get("/server_info").json()["internal_states"][0]["kvir"]


def prefills(server: Server) -> dict[str, list[int]]:
    """By request id, the lengths at which its prefills ended: one, and one more for each retraction."""
    found: dict[str, list[int]] = {}
    for entry in kvir_state(server)["finished"]:
        found.setdefault(entry["rid"], []).append(entry["prompt_tokens"])
    return found
