"""What a server says about itself, and what must hold when it is idle."""

from __future__ import annotations

import re
import time
from typing import Any

from evaluation.server import Server

TROUBLE = re.compile(r"Traceback|kvir: (?!plan )|leak|exception", re.IGNORECASE)


def kvir_state(server: Server) -> dict[str, Any]:
    """The evidence that kvir adds to the server's internal state."""
    state = server.get("/server_info").json()["internal_states"][0]["kvir"]
    for request in state["running"]:  # head-pages in the stock of a selection are nobody's yet
        assert sum(request["by_unit"]) <= request["head_pages_held"]
    return state


def wait_idle(server: Server, timeout_s: float = 120) -> dict[str, Any]:
    """The evidence once no request runs: an answer comes back a moment before its residency ends."""
    deadline = time.monotonic() + timeout_s
    while (state := kvir_state(server))["running"]:
        assert time.monotonic() < deadline, f"requests are still running: {state['running']}"
        time.sleep(0.05)
    return state


def assert_healthy(server: Server) -> None:
    """Idle, nothing covered, every head-page accounted for, and nothing in the log."""
    state = wait_idle(server)
    pages = state["head_pages"]
    assert pages["covered"] == 0
    assert pages["free"] + pages["quarantined"] + pages["idle"] == pages["pool"]
    assert server.get("/health_generate").status_code == 200
    assert server.alive()
    trouble = [line for line in server.log.read_text().splitlines() if TROUBLE.search(line)]
    assert not trouble, trouble
