"""A running server's own account of its memory."""

from __future__ import annotations

import threading
from typing import Any

import httpx

from evaluation.server import Server


def kvir_state(server: Server) -> dict[str, Any]:
    return server.get("/server_info").json()["internal_states"][0]["kvir"]


def prefills(server: Server) -> dict[str, list[int]]:
    """By request id, the lengths at which its prefills ended: one, and one more for each retraction."""
    found: dict[str, list[int]] = {}
    for entry in kvir_state(server)["finished"]:
        found.setdefault(entry["rid"], []).append(entry["prompt_tokens"])
    return found


class Watch:
    """Looks at the server again and again while a block runs; `seen` are its accounts."""

    def __init__(self, server: Server, every_s: float = 0.01) -> None:
        self.seen: list[dict[str, Any]] = []
        self._server, self._every_s = server, every_s
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        # a client of its own: the server's is busy with the requests
        with httpx.Client(base_url=self._server.url, timeout=600, trust_env=False) as client:
            while not self._done.is_set():
                info = client.get("/server_info").json()
                self.seen.append(info["internal_states"][0]["kvir"])
                self._done.wait(self._every_s)
