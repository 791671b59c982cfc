"""`kvir trace` against a server that says what it holds."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvir.cli import main
from kvir.evals import trace


def state(*running: tuple[str, int, list[int]]) -> dict[str, Any]:
    requests = [{"rid": rid, "pages": pages, "by_unit": units} for rid, pages, units in running]
    return {"plan": "p", "units": 4, "kv_heads": 2, "running": requests}


STATES = [
    state(),
    state(("a", 3, [3, 3, 3, 3])),
    state(("a", 5, [5, 2, 3, 4]), ("b", 1, [1, 1, 1, 1])),
    state(("a", 6, [4, 2, 2, 3])),
    state(),
]


@pytest.fixture
def url() -> Iterator[str]:
    left = list(STATES)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            kvir = left.pop(0) if len(left) > 1 else left[0]
            self.wfile.write(json.dumps({"internal_states": [{"kvir": kvir}]}).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_until_requests_came_and_went(url: str, tmp_path: Path) -> None:
    out, picture = tmp_path / "t.jsonl", tmp_path / "t.png"
    words = ["trace", "--url", url, "--every", "0.01", "-o", str(out), "--picture", str(picture)]
    assert main(words) == 0
    found = trace.load(out.read_bytes())
    assert found.header == trace.Header("p", 2, 4)
    assert [len(look.running) for look in found.looks] == [0, 1, 2, 1, 0]
    _, pages, units = trace.longest(found)
    assert pages == [3, 5, 6]
    assert units == [(3, 3, 3, 3), (5, 2, 3, 4), (4, 2, 2, 3)]
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again.png"
    assert main(["trace", str(out), "--picture", str(again)]) == 0
    assert again.read_bytes() == picture.read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trace"], "nothing to write"),
        (["trace", "--url", "http://127.0.0.1:9", "-o", "x"], "http://127.0.0.1:9"),
        (["trace", "pyproject.toml", "-o", "x"], "not what `kvir trace` wrote"),
    ],
)
def test_bad_input(words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [str(tmp_path / w) if w == "x" else w for w in words]
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
