"""What a calibration has found so far, on disk: interrupted work goes on from the last finished layer.

Every finding is named by what it depends on, such as the choices of all lower layers, so passes of different
thresholds share what they have in common, and a resumed run finds exactly what the interrupted one found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvir.lowering.plan_file import write_atomically


class Memo:
    """Findings of one calibration.  `inputs` is all that they depend on; a file of others is not used."""

    def __init__(self, path: Path | None, inputs: object) -> None:
        self.path = path
        self._key = digest(inputs)
        self._found: dict[str, Any] = {}
        if path is not None and path.exists():
            try:
                stored = json.loads(path.read_text(encoding="utf-8"))
                if stored["inputs"] == self._key:
                    self._found = stored["found"]
            except (ValueError, KeyError, TypeError):
                pass  # the file of a machine that lost power: begin again

    def __len__(self) -> int:
        return len(self._found)

    def __contains__(self, name: object) -> bool:
        return digest(name) in self._found

    def get(self, name: object, find: Callable[[], Any]) -> Any:
        """The finding of that name, found and written down first if it is not there.  Plain JSON values."""
        key = digest(name)
        if key not in self._found:
            self._found[key] = find()
            if self.path is not None:
                text = json.dumps({"inputs": self._key, "found": self._found})
                write_atomically(self.path, text.encode())
        return self._found[key]

    def close(self) -> None:
        """The calibration is whole: nothing is left to resume."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def digest(value: object) -> str:
    """A name for a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
