"""Start an SGLang server as a subprocess, use it, and leave nothing behind.

    with serve(Launch(model=path, kv_ir=Path("examples/plan.ir"), threads=2)) as server:
        server.generate(prompt_ids, max_new_tokens=16)

The server is stock `python -m sglang.launch_server --device cpu`; kvir comes in by its entry point alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

READY_TIMEOUT_S = 600.0  # starting takes about 30 s on two idle cores
STOP_TIMEOUT_S = 10.0
TAIL_LINES = 60


class ServerError(RuntimeError):
    """The server did not start, died, or answered an error; the text ends with the tail of its log."""


@dataclass(frozen=True)
class Launch:
    """How to start a server.  Without `kv_ir` it is plain stock SGLang, on its `torch_native` backend."""

    model: Path
    kv_ir: Path | None = None
    dtype: str = "float32"
    page_tokens: int = 16
    max_total_tokens: int | None = None  # pool bytes, given as tokens of full KV
    max_running_requests: int = 16
    chunked_prefill_tokens: int | None = None
    threads: int = 1  # of OpenMP; more threads than idle cores make decode many times slower
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    module: str = "sglang.launch_server"

    def command(self, port: int) -> list[str]:
        """The command line, as a user would type it."""
        words = [sys.executable, "-m", self.module, "--device", "cpu", "--port", str(port)]
        words += ["--model-path", str(self.model), "--dtype", self.dtype, "--enable-metrics"]
        # An idle scheduler would otherwise spin on a whole core.
        words += ["--max-running-requests", str(self.max_running_requests), "--sleep-on-idle"]
        if self.kv_ir is None:
            words += ["--attention-backend", "torch_native", "--page-size", str(self.page_tokens)]
        else:
            words += ["--kv-ir", str(self.kv_ir)]
        if self.max_total_tokens is not None:
            words += ["--max-total-tokens", str(self.max_total_tokens)]
        if self.chunked_prefill_tokens is not None:
            words += ["--chunked-prefill-size", str(self.chunked_prefill_tokens)]
        return [*words, *self.arguments]


@dataclass(frozen=True)
class Served:
    """One finished request: what went in, what came out, and how sure the model was."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]  # of each output token
    top: tuple[tuple[tuple[int, float], ...], ...]  # per output token: (token, log-probability), best first
    cached_tokens: int  # of the prompt, found in the prefix cache
    retractions: int
    meta: Mapping[str, Any] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Server:
    """A running server."""

    launch: Launch
    url: str
    log: Path
    process: subprocess.Popen[bytes]
    client: httpx.Client

    def get(self, path: str) -> httpx.Response:
        return self._checked(self.client.get(path))

    def post(self, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        return self._checked(self.client.post(path, json=body))

    def _checked(self, response: httpx.Response) -> httpx.Response:
        if response.is_error:
            where = f"{response.request.method} {response.request.url.path}"
            raise ServerError(f"{where}: HTTP {response.status_code}: {response.text[:2000]}\n{self.tail()}")
        return response

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        top_logprobs: int = 5,
        ignore_eos: bool = True,
        extra_key: str | None = None,
    ) -> Served:
        """Greedy continuation of a prompt, with the log-probability of every token.

        `extra_key` gives the request a prefix cache of its own.
        """
        body: dict[str, Any] = {
            "input_ids": list(prompt_ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos},
            "return_logprob": True,
            "top_logprobs_num": top_logprobs,
        }
        if extra_key is not None:
            body["extra_key"] = extra_key
        answer = self.post("/generate", body).json()
        meta = answer["meta_info"]
        return Served(
            prompt_ids=tuple(prompt_ids),
            output_ids=tuple(answer["output_ids"]),
            text=answer["text"],
            logprobs=tuple(_number(entry[0]) for entry in meta["output_token_logprobs"]),
            top=tuple(
                tuple((int(entry[1]), _number(entry[0])) for entry in entries)
                for entries in meta.get("output_top_logprobs") or ()
            ),
            cached_tokens=int(meta["cached_tokens"]),
            retractions=int(meta.get("num_retractions") or 0),
            meta=meta,
        )

    def generate_all(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, *, concurrency: int = 16, **options: Any
    ) -> list[Served]:
        """Several requests at once, answers in the order of the prompts."""
        with ThreadPoolExecutor(concurrency) as pool:
            return list(pool.map(lambda ids: self.generate(ids, max_new_tokens, **options), prompts))

    def flush_cache(self) -> None:
        """Empty the prefix cache.  Refused while a request runs, so wait for the last to leave."""
        for _ in range(100):
            if self.client.post("/flush_cache").is_success:
                return
            time.sleep(0.1)
        raise ServerError(f"the prefix cache could not be flushed\n{self.tail()}")

    def metrics(self) -> dict[str, float]:
        """Sums over all labels of every metric: {name: value}."""
        return parse_metrics(self.get("/metrics").text)

    def info(self) -> dict[str, Any]:
        """The server's own account of itself; `internal_states` has one entry per rank."""
        return self.get("/get_server_info").json()

    def alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, lines: int = TAIL_LINES) -> str:
        return log_tail(self.log, lines)


def _number(value: float | None) -> float:
    # A NaN does not survive JSON: it comes back as null.  It must stay visible.
    return float("nan") if value is None else float(value)


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text format -> value per metric name, summed over labels."""
    from prometheus_client.parser import text_string_to_metric_families

    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


def log_tail(log: Path, lines: int = TAIL_LINES) -> str:
    text = log.read_text(errors="replace").splitlines()
    return "\n".join([f"---- the last lines of {log}", *text[-lines:], "----"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def serve(
    launch: Launch, *, log: Path | None = None, ready_timeout_s: float = READY_TIMEOUT_S
) -> Iterator[Server]:
    """Run a server for the length of a `with` block.

    Raises ServerError if it does not become ready.  At the end its whole process group is gone, and so it is
    if this process gets a SIGTERM.
    """
    with _sigterm_unwinds():
        process, server = start(launch, log=log)
        try:
            wait_ready(server, ready_timeout_s)
            yield server
        finally:
            server.client.close()
            stop(process)


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """SIGTERM becomes SystemExit, where nobody else has decided what it does; only the main thread can."""
    free = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not free or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def start(launch: Launch, *, log: Path | None = None) -> tuple[subprocess.Popen[bytes], Server]:
    """Start the process and return at once; `wait_ready` and `stop` are the caller's."""
    if log is None:
        handle, name = tempfile.mkstemp(prefix="kvir-server-", suffix=".log")
        os.close(handle)
        log = Path(name)
    port = free_port()
    environment = dict(os.environ)
    environment |= {"OMP_NUM_THREADS": str(launch.threads), "MKL_NUM_THREADS": str(launch.threads)}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    # A server that fails or is stopped would first wait a minute for dumps of the GPU.
    environment |= {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
    environment |= launch.environment
    with log.open("wb") as stream:
        process = subprocess.Popen(
            launch.command(port),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # so that `stop` reaches every child
        )
    url = f"http://127.0.0.1:{port}"
    # a connection that uvicorn closes after five idle seconds must not be taken up again just then
    limits, timeout = httpx.Limits(keepalive_expiry=2), httpx.Timeout(1800, connect=10)
    client = httpx.Client(base_url=url, timeout=timeout, limits=limits, trust_env=False)
    return process, Server(launch, url, log, process, client)


def wait_ready(server: Server, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Return when the server answers `/health`.  Raises ServerError when it dies first or takes too long."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        code = server.process.poll()
        if code is not None:
            raise ServerError(f"the server ended with exit code {code} before it was ready\n{server.tail()}")
        with contextlib.suppress(httpx.TransportError):
            if server.client.get("/health", timeout=30).is_success:
                return
        time.sleep(0.5)
    raise ServerError(f"the server was not ready after {timeout_s:.0f} s\n{server.tail()}")


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the whole process group, first politely, then for certain; return when nothing of it runs."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    _signal_group(process, signal.SIGTERM)
    while time.monotonic() < deadline and _group_alive(process.pid):
        time.sleep(0.1)
    _signal_group(process, signal.SIGKILL)
    process.wait()
    while _group_alive(process.pid):
        time.sleep(0.1)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _group_alive(group: int) -> bool:
    """Whether a process of the group still runs.  Zombies do not count: a container may reap none."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that ended just now
            state, _parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return False
