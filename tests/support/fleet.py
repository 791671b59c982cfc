"""Servers for tests: one in use at a time, and the next one on its way while that one is used.

Starting a server is 25 seconds of imports in three processes, far more than most tests ask of it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from evaluation.server import Launch, Server, start, stop, wait_ready

Started = tuple[subprocess.Popen[bytes], Server]


class Fleet:
    """Servers by name.  `order` is the order in which the names will be asked for, as far as it is known."""

    def __init__(
        self, launches: Mapping[str, Callable[[], Launch]], order: Sequence[str], logs: Path
    ) -> None:
        self._launches = launches
        self._order = list(order)
        self._logs = logs
        self._at = -1
        self._started: dict[str, Started] = {}
        self._ready: set[str] = set()
        self._stopping = ThreadPoolExecutor()

    def use(self, name: str) -> Server:
        """The running server of this name.  The one used before is stopped, the one after it is started.

        Raises ServerError if it does not become ready.
        """
        if self._at < 0 or self._order[self._at] != name:
            rest = self._order[self._at + 1 :]
            self._at += 1
            if name in rest:
                self._at += rest.index(name)
            else:
                self._order.insert(self._at, name)
        ahead = self._order[self._at + 1 : self._at + 2]
        for other in [n for n in self._started if n not in (name, *ahead)]:
            self._stop(other)
        self._start(name)
        server = self._started[name][1]
        if name not in self._ready:
            wait_ready(server)
            self._ready.add(name)
        for other in ahead:
            self._start(other)
        return server

    def _start(self, name: str) -> None:
        if name not in self._started:
            self._started[name] = start(self._launches[name](), log=self._logs / f"{name}.log")

    def _stop(self, name: str) -> None:
        process, server = self._started.pop(name)
        self._ready.discard(name)
        server.client.close()
        self._stopping.submit(stop, process)

    def close(self) -> None:
        for name in list(self._started):
            self._stop(name)
        self._stopping.shutdown(wait=True)
