"""Rows by score: agreement with kvpress, what selecting costs, and what decoding gains.

    make bench-selection                      everything, about twenty minutes on two cores
    python -m bench.selection cost            some parts (rows, cost, decode, compiled)

`rows` asks the golden test how many kept rows are those of kvpress.  `cost` is the time to the first token of
a prompt of 4,096 tokens, alone, over that of the identity policy, less one: scoring and copying.  `decode` is
the decode speed of eight requests at 4,096 tokens after SnapKV at 10 %, over the identity policy; `compiled`
the same with `--enable-torch-compile`, which makes all but attention faster, in both, in bfloat16.  Servers
take turns, so that a machine that slows down slows all of them; medians are compared.  Prompts are read in
float32, where a CPU is fastest and scoring weighs most; decode is in float32 and in bfloat16.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bench.decode import measure
from evaluation.agree import token_stream
from evaluation.models import model_path
from evaluation.server import Launch, Server, ServerError, serve

ROOT = Path(__file__).resolve().parent.parent
CONTEXT_TOKENS, BATCH = 4_096, 8
SHARE = 0.10
DTYPES = ("float32", "bfloat16")
COMPILED = ("--enable-torch-compile", "--cuda-graph-bs-decode", str(BATCH))
POLICIES = {
    "identity": "keep: all",
    "snapkv": "keep: [{recent: 32}, {top_k: {fraction: %s, by: {attention: {pool: {max: 7}}}}}]",
    "laprox": "keep: [{recent: 32}, {top_k: {fraction: %s, by: laprox, scope: model}}]",
}


def rows() -> None:
    """One figure per method of the golden file."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "tests/kernels/test_golden_kvpress.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    figures = re.findall(r"kept_rows_equal_(\w+) = (\d+/\d+)", done.stdout)
    for method, same in figures:
        print(f"bench: kept_rows_equal_{method} = {same}", flush=True)
    if done.returncode or len(figures) != 13:
        sys.exit(f"bench: the golden test failed\n{done.stdout[-2000:]}")


def cost(rounds: int, threads: int) -> None:
    ids = token_stream(model_path("smollm2"))
    with servers(POLICIES, threads, 2 * CONTEXT_TOKENS + 1024, "float32") as running:
        seconds: dict[str, list[float]] = {name: [] for name in running}
        for number in range(rounds + 1):
            prompt = _cut(ids, 3_000 * number)
            for name in _turn(list(running), number):
                running[name].flush_cache()
                started = time.perf_counter()
                running[name].generate(prompt, 1, top_logprobs=0)
                if number:  # the first round warms up
                    seconds[name].append(time.perf_counter() - started)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, taken in median.items():
        print(f"prefill of {CONTEXT_TOKENS:,} tokens, {name:8}: {taken * 1e3:7.0f} ms", flush=True)
    for name in ("snapkv", "laprox"):
        print(f"bench: {name}_cost_vs_prefill = {median[name] / median['identity'] - 1:.3f}", flush=True)


def decode(
    rounds: int, threads: int, dtypes: Sequence[str] = DTYPES, arguments: tuple[str, ...] = ()
) -> None:
    ids = token_stream(model_path("smollm2"))
    prompts = [_cut(ids, 5_000 * i) for i in range(BATCH)]
    named = {name: POLICIES[name] for name in ("identity", "snapkv")}
    for dtype in dtypes:
        _decode(named, prompts, rounds, threads, dtype, arguments)


def _decode(
    named: dict[str, str],
    prompts: list[list[int]],
    rounds: int,
    threads: int,
    dtype: str,
    arguments: tuple[str, ...],
) -> None:
    with servers(named, threads, (BATCH + 1) * (CONTEXT_TOKENS + 128), dtype, arguments) as running:
        for server in running.values():
            server.generate_all(prompts, 2)
        steps: dict[str, list[float]] = {name: [] for name in running}
        for number in range(rounds):
            for name in _turn(list(running), number):
                steps[name].append(measure(running[name], prompts))
    median = {name: statistics.median(taken) for name, taken in steps.items()}
    kind = "_compiled" if arguments else ""
    for name, taken in median.items():
        print(
            f"batch {BATCH} at {CONTEXT_TOKENS:,}, {dtype}{kind}, {name:8}: {taken * 1e3:6.1f} ms a step",
            flush=True,
        )
    ratio = median["identity"] / median["snapkv"]
    print(f"bench: decode_after_snapkv10_vs_identity_{dtype}{kind} = {ratio:.2f}", flush=True)


@contextmanager
def servers(
    policies: dict[str, str], threads: int, pool_tokens: int, dtype: str, arguments: tuple[str, ...] = ()
) -> Iterator[dict[str, Server]]:
    """One server per policy, all running."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        running: dict[str, Server] = {}
        for name, keep in policies.items():
            text = keep % SHARE if "%s" in keep else keep
            path = folder / f"{name}.ir"
            path.write_text(f"kvir: 1\nname: {name}\nrules:\n  - {text}\n", encoding="utf-8")
            print(f"starting {name} (about half a minute, two where the model is compiled)", flush=True)
            launch = Launch(
                model=model_path("smollm2"),
                kv_ir=path,
                dtype=dtype,
                max_total_tokens=pool_tokens,
                threads=threads,
                arguments=arguments,
            )
            running[name] = stack.enter_context(serve(launch))
        yield running


def _cut(ids: Sequence[int], start: int) -> list[int]:
    start %= len(ids) - CONTEXT_TOKENS
    return list(ids[start : start + CONTEXT_TOKENS])


def _turn(names: list[str], number: int) -> list[str]:
    return names if number % 2 == 0 else names[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Rows by score: agreement, cost, gain.")
    parser.add_argument("parts", nargs="*", help="rows, cost, decode, compiled (all)")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each server (%(default)s)")
    threads = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=threads, help="of OpenMP, every server")
    options = parser.parse_args()
    parts: dict[str, Callable[[], None]] = {
        "rows": rows,
        "cost": lambda: cost(options.rounds, options.threads),
        "decode": lambda: decode(options.rounds, options.threads),
        "compiled": lambda: decode(options.rounds, options.threads, ("bfloat16",), COMPILED),
    }
    if unknown := [part for part in options.parts if part not in parts]:
        parser.error(f"no such part: {', '.join(unknown)}")
    for part in options.parts or parts:
        try:
            parts[part]()
        except ServerError as error:
            sys.exit(f"bench: {error}")


if __name__ == "__main__":
    main()
