"""Decode speed of kvir against stock SGLang, in one run.

    make bench-decode

Two servers on the same model in bfloat16: stock SGLang on its `torch_native` backend with pages of 16 tokens,
and kvir with a policy that keeps every row.  They take turns, so that a machine that slows down slows both.
Prompts are in the prefix cache before the clock starts; only steps in which the whole batch decodes count.

The last lines are for machines; `bench: decode_batch8_vs_stock = X` is kvir's tokens per second over stock's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation import needles
from evaluation.models import model_path
from evaluation.server import Launch, Server, ServerError, serve

ROOT = Path(__file__).resolve().parent.parent
IDENTITY = ROOT / "examples" / "identity.ir"
LOGS = ROOT / "out" / "bench"
CONTEXT_TOKENS = 1_024
NEW_TOKENS = 64
BATCHES = (8, 1)


@dataclass
class Steps:
    """Decode steps of one kind of server and one batch size, in seconds."""

    seconds: list[float] = field(default_factory=list[float])

    def median(self) -> float:
        return statistics.median(self.seconds)

    def spread(self) -> str:
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return f"{low * 1e3:.1f}..{high * 1e3:.1f}"


def stream(server: Server, prompt: Sequence[int], barrier: threading.Barrier) -> list[float]:
    """When each output token of one request arrived, in seconds."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "stream": True,
    }
    times: list[float] = []
    barrier.wait()
    with server.client.stream("POST", "/generate", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                now, seen = time.perf_counter(), json.loads(line[6:])["meta_info"]["completion_tokens"]
                times += [now] * (seen - len(times))
    if len(times) != NEW_TOKENS:
        raise ServerError(f"{len(times)} tokens came instead of {NEW_TOKENS}\n{server.tail()}")
    return times


def measure(server: Server, prompts: Sequence[Sequence[int]]) -> float:
    """Mean seconds of a decode step with all prompts in the batch."""
    barrier = threading.Barrier(len(prompts))
    with ThreadPoolExecutor(len(prompts)) as pool:
        times = list(pool.map(lambda prompt: stream(server, prompt, barrier), prompts))
    start, stop = max(each[0] for each in times), min(each[-1] for each in times)
    ticks = [tick for tick in times[0] if start <= tick <= stop]
    if len(ticks) < NEW_TOKENS // 2:
        raise ServerError(f"the batch decoded together for {len(ticks)} steps only\n{server.tail()}")
    return (ticks[-1] - ticks[0]) / (len(ticks) - 1)


def prompts_of(model: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    most = max(BATCHES) * CONTEXT_TOKENS
    ids: list[int] = []
    for paragraph in needles.paragraphs():
        ids += tokenizer.encode(paragraph, add_special_tokens=False)
        if len(ids) >= most:
            break
    return [ids[i * CONTEXT_TOKENS :][:CONTEXT_TOKENS] for i in range(max(BATCHES))]


def run(rounds: int, threads: int) -> dict[int, float]:
    model = model_path("smollm2")
    prompts = prompts_of(model)
    LOGS.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, plan in (("stock", None), ("kvir", IDENTITY)):
            print(f"starting {name} (about half a minute)", flush=True)
            launch = Launch(
                model=model, kv_ir=plan, dtype="bfloat16", max_total_tokens=16_384, threads=threads
            )
            servers[name] = stack.enter_context(serve(launch, log=LOGS / f"{name}.log"))
            # Puts the prompts into the prefix cache and warms every code path.
            servers[name].generate_all(prompts, NEW_TOKENS)
        ratios: dict[int, float] = {}
        for batch in BATCHES:
            steps = {name: Steps() for name in servers}
            for number in range(rounds):
                order = list(servers) if number % 2 == 0 else list(servers)[::-1]
                for name in order:
                    steps[name].seconds.append(measure(servers[name], prompts[:batch]))
            for name, taken in steps.items():
                median = taken.median()
                print(
                    f"batch {batch}, context {CONTEXT_TOKENS:,}, {name:5}: {median * 1e3:6.1f} ms a step "
                    f"(quartiles {taken.spread()}), {batch / median:6.1f} tokens/s",
                    flush=True,
                )
            ratios[batch] = steps["stock"].median() / steps["kvir"].median()
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode speed of kvir against stock SGLang.")
    parser.add_argument(
        "--rounds", type=int, default=9, help="turns of each server and batch size (%(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of OpenMP, both servers"
    )
    options = parser.parse_args()
    try:
        ratios = run(options.rounds, options.threads)
    except ServerError as error:
        sys.exit(f"bench: {error}")
    for batch, ratio in ratios.items():
        print(f"bench: decode_batch{batch}_vs_stock = {ratio:.3f}", flush=True)
    environment = dict(os.environ) | {"OMP_NUM_THREADS": str(options.threads)}
    sys.exit(
        subprocess.run([sys.executable, "-m", "bench.decode_kernel"], cwd=ROOT, env=environment).returncode
    )


if __name__ == "__main__":
    main()
