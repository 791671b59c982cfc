"""A running server's own account of its memory."""

from __future__ import annotations

import threading
from typing import Any

import httpx

from evaluation.server import Server


class Running:
    """Counts the requests that run together, while a block runs."""

    def __init__(self, server: Server) -> None:
        self.most = 0
        self._server = server
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=600, trust_env=False) as client:
            while not self._done.wait(0.2):
                info = client.get("/server_info").json()
                self.most = max(self.most, len(info["internal_states"][0]["kvir"]["running"]))


def kvir_state(server: Server) -> dict[str, Any]:
    return server.get("/server_info").json()["internal_states"][0]["kvir"]


def prefills(server: Server) -> dict[str, list[int]]:
    """By request id, the lengths at which its prefills ended: one, and one more for each retraction."""
    found: dict[str, list[int]] = {}
    for entry in kvir_state(server)["finished"]:
        found.setdefault(entry["rid"], []).append(entry["prompt_tokens"])
    return found
