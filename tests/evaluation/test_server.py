"""The server harness, with small programs in place of SGLang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from evaluation import server
from evaluation.server import Launch, ServerError, parse_metrics, serve, stop

ROOT = Path(__file__).resolve().parents[2]
# A leader that ignores SIGTERM, with a child in the same group.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
# The part of a server that the harness needs.
SERVER = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"{}")
    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length") or 0))
        top = [[[None, 7, None], [-0.5, 9, None]]]
        meta = {"output_token_logprobs": [[None, 7, None]], "output_top_logprobs": top, "cached_tokens": 3}
        code = 200 if self.path == "/generate" else 400
        self.send_response(code); self.end_headers()
        self.wfile.write(json.dumps({"output_ids": [7], "text": "x", "meta_info": meta}).encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@dataclass(frozen=True)
class Program(Launch):
    """A Python program instead of SGLang; gets the port as its argument."""

    source: str = ""

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-c", self.source, str(port)]


def runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_stop_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STOP_TIMEOUT_S", 0.5)
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert runs(child)
    stop(process)
    assert process.poll() is not None
    assert not runs(child)
    process.stdout.close()


def test_a_server_ends_with_the_process_that_serves_it(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, __file__, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert runs(child)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert not runs(child)
    process.stdout.close()


def test_a_server_that_dies_shows_its_log(tmp_path: Path) -> None:
    launch = Program(model=tmp_path, source="import sys; sys.exit('no such model')")
    with pytest.raises(ServerError, match="exit code 1") as error, serve(launch, log=tmp_path / "log"):
        pytest.fail("the server never became ready")
    assert "no such model" in str(error.value)


def test_a_server_that_never_answers(tmp_path: Path) -> None:
    launch = Program(model=tmp_path, source="import time; print('loading', flush=True); time.sleep(600)")
    started = time.monotonic()
    with (
        pytest.raises(ServerError, match="not ready after 2 s"),
        serve(launch, log=tmp_path / "log", ready_timeout_s=2),
    ):
        pytest.fail("the server never became ready")
    assert time.monotonic() - started < 60


def test_requests(tmp_path: Path) -> None:
    """A NaN, which JSON turns into null, stays visible; an error carries the answer and the log."""
    with serve(Program(model=tmp_path, source=SERVER), log=tmp_path / "log") as running:
        answer = running.generate([1, 2, 3, 4], 1)
        assert answer.output_ids == (7,)
        assert answer.logprobs[0] != answer.logprobs[0]
        assert answer.top[0][1] == (9, -0.5)
        assert answer.cached_tokens == 3
        with pytest.raises(ServerError, match="POST /nothing: HTTP 400"):
            running.post("/nothing", {})
        process = running.process
    assert process.poll() is not None


def test_the_command_line_is_stock(tmp_path: Path) -> None:
    stock = Launch(model=tmp_path, page_tokens=16).command(1)
    assert stock[1:4] == ["-m", "sglang.launch_server", "--device"]
    assert "--kv-ir" not in stock
    assert stock[stock.index("--attention-backend") + 1] == "torch_native"
    ours = Launch(model=tmp_path, kv_ir=tmp_path / "plan.ir", max_total_tokens=64).command(1)
    assert ours[ours.index("--kv-ir") + 1] == str(tmp_path / "plan.ir")
    assert ours[ours.index("--max-total-tokens") + 1] == "64"
    assert "--attention-backend" not in ours


def test_metrics_are_summed_over_labels() -> None:
    text = '# TYPE kvir_free_bytes gauge\nkvir_free_bytes{rank="0"} 3\nkvir_free_bytes{rank="1"} 4\n'
    assert parse_metrics(text) == {"kvir_free_bytes": 7.0}


def test_threads_and_offline_reach_the_server(tmp_path: Path) -> None:
    source = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['HF_HUB_OFFLINE'], os.environ['X'])"
    launch = Program(model=tmp_path, source=source, threads=3, environment={"X": "y"})
    with pytest.raises(ServerError), serve(launch, log=tmp_path / "log"):
        pytest.fail("the server never became ready")
    assert (tmp_path / "log").read_text().split() == ["3", "1", "y"]
    assert "X" not in os.environ


if __name__ == "__main__":  # serves until it is stopped, and says which process that is
    folder = Path(sys.argv[1])
    with serve(Program(model=folder, source=SERVER), log=folder / "log") as serving:
        print(serving.process.pid, flush=True)
        time.sleep(600)
