"""Eviction while decoding, head by head: what is served against the oracle, memory, a crowd, and the cost.

    make bench-hardkv                                  everything, some hours on two cores
    python -m bench.hardkv memory snapkv:0.9:32:evict  some parts (--list names them)

METRIC:P:EVERY:OVERFLOW    six requests of unequal length generate up to 600 tokens, one of them ending on a
    trigger, with overlap scheduling, without it, and with retraction: against the oracle, float32.
    `'*:*'` stands for all of them; `--tiny` takes the small random model of the tests, where a row more or
    less in one head moves a log-probability by more than 1e-2
memory    one request: head-pages at every look against rows, head by head, and against a layout that pads
    every head of a layer to the longest, as the published one does
crowd     twelve requests of 2,000 generated tokens in a pool for four of full KV, against stock SGLang there
cost      one request's trigger at 4,096 rows, in a batch of eight, in decode steps
quality:P:CAP    given answers of 2,000 tokens, text and hidden numbers: Hard-KV, as many rows for every head
    (top-k), floors and caps or rows of each head's own, and full KV.  Answers of a policy are kept in the
    folder of --answers, and taken again from there

Exit code 1 if anything is not as it must be.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from bench.parts import forced, head_adaptive, long_answers
from bench.parts.figures import Figures, run_parts, say
from bench.parts.variants import variants
from evaluation.agree import token_stream
from evaluation.models import model_path
from evaluation.oracle import check
from evaluation.rounding import ties
from evaluation.selection_oracle import SelectionOracle, replays
from evaluation.server import Launch, Served, Server, serve
from evaluation.traffic import PAGE_TOKENS, Traffic
from evaluation.watch import Watch, kvir_state, prefills
from kvir.calibration.harness import Harness
from kvir.lowering.load import plan_for_server
from support import tiny_llama

METRICS = {
    "snapkv": "{attention: {window: 32}}",
    "rkv": "{rkv: {weight: 0.07, importance: {attention: {window: 32}}}}",
    "laprox": "{laprox: {window: 32}}",
}
MASSES, EVERY, OVERFLOWS = (0.9, 0.6), (32, 128), ("evict", "merge")
RULE = (
    "keep: [{sink: 4}, {recent: 32}, {top_p: {mass: %s, by: %s, of: {attention: {window: 32}}, floor: 16, "
    "cap: %d}}], trigger: {every: %d}, region: %s, overflow: %s"
)
PROMPTS = (40, 120, 255, 300, 513, 700)
NEW_TOKENS = (600, 512, 300, 450, 64, 600)  # 512 and 64 end on a trigger
VARIANTS = variants(retract_every=97)
ANSWERS = 12  # of each kind, at once
CROWD, CROWD_PROMPT, CROWD_TOKENS, CROWD_CAP, ROOM_FOR = 12, 64, 2000, 256, 4


class Bench:
    def __init__(self, figures: Figures, folder: Path, options: argparse.Namespace) -> None:
        self.figures, self.folder, self.threads = figures, folder, options.threads
        self.crowd_tokens: int = options.crowd_tokens
        self.answers: Path = options.answers
        self.suffix = "_tiny" if options.tiny else ""
        if options.tiny:
            self.model, self.ids = tiny_llama.make(folder / "tiny"), tiny_llama.token_stream(60_000)
        else:
            self.model = model_path("smollm2")
            self.ids = token_stream(self.model)

    def file(
        self,
        metric: str = "snapkv",
        mass: float = 0.9,
        every: int = 128,
        overflow: str = "evict",
        *,
        cap: int = CROWD_CAP,
        region: str = "generated",
    ) -> Path:
        rule = RULE % (mass, METRICS[metric], cap, every, region, overflow)
        return self._written(f"{metric}-{mass}-{every}-{overflow}-{cap}-{region}", rule)

    def _written(self, stem: str, rule: str) -> Path:
        path = self.folder / f"{stem}.ir"
        path.write_text(f"kvir: 1\nname: bench\nrules:\n  - {{{rule}}}\n")
        return path

    def launch(
        self, file: Path | None, pool_tokens: int, variant: str = "overlap", dtype: str = "float32"
    ) -> Launch:
        arguments, environment = VARIANTS[variant]
        return Launch(
            model=self.model,
            kv_ir=file,
            dtype=dtype,
            max_total_tokens=pool_tokens,
            chunked_prefill_tokens=256,
            threads=self.threads,
            arguments=arguments,
            environment=environment,
        )

    # ---- parts ---------------------------------------------------------------------------------------------

    def served(self, metric: str, mass: float, every: int, overflow: str) -> None:
        file = self.file(metric, mass, every, overflow)
        oracle = SelectionOracle(self.model, plan_for_server(file, self.model, dtype="float32"))
        for variant in VARIANTS:
            label = f"{metric}_p{mass:g}_every{every}_{overflow}_{variant}{self.suffix}"
            with serve(self.launch(file, 8192, variant)) as server:
                say(f"serving {label}")
                traffic = Traffic(server, self.ids)
                prompts = [traffic.cut(1777 * i, n) for i, n in enumerate(PROMPTS)]
                with ThreadPoolExecutor(len(prompts)) as pool:
                    answers = list(pool.map(server.generate, prompts, NEW_TOKENS))
                asked, state = replays(answers, prefills(server)), kvir_state(server)
            self.figures.agreement(label, check(oracle, asked), lambda asked=asked: ties(oracle, asked))
            evicted = state["counters"]["rows_evicted"]
            self.figures.add(f"{label}_rows_evicted", evicted, ok=evicted > 0)
            retractions = sum(answer.retractions for answer in answers)
            self.figures.add(
                f"{label}_retractions", retractions, ok=(retractions > 0) == (variant == "retract")
            )

    def memory(self) -> None:
        file = self.file(every=32, region="all")
        with serve(self.launch(file, 8192)) as server, Watch(server, 0.05) as watch:
            Traffic(server, self.ids).one_by_one([self.ids[:1000]], 600)
        looks = [r for look in watch.seen for r in look["running"] if r["selected"]]
        requests = [r for r in looks if r["selected"]["settled"]]  # what a selection left is back in the pool
        wrong, held, padded = 0, 0, 0
        kv_heads = watch.seen[-1]["kv_heads"]
        for r in requests:
            parts = zip(r["by_unit"], r["selected"]["rows"], r["selected"]["dense_from"], strict=True)
            wrong += sum(
                pages != -(-rows // PAGE_TOKENS) + r["pages"] - start // PAGE_TOKENS
                for pages, rows, start in parts
            )
            by_layer = [r["by_unit"][i : i + kv_heads] for i in range(0, len(r["by_unit"]), kv_heads)]
            held, padded = held + sum(r["by_unit"]), padded + sum(kv_heads * max(x) for x in by_layer)
        most = len(requests) > 20 and len(requests) > 0.8 * len(looks)
        self.figures.add("memory_looks", f"{len(requests)} of {len(looks)}", ok=most)
        self.figures.add("memory_units_not_as_their_rows", wrong, ok=wrong == 0)
        self.figures.add("memory_of_longest_head_layout", f"{held / padded:.3f}")

    def crowd(self) -> None:
        """The same requests under the plan and under stock SGLang, in equal pools."""
        pool = ROOM_FOR * (CROWD_PROMPT + self.crowd_tokens)
        seconds: dict[str, float] = {}
        for name, file in (("kvir", self.file()), ("stock", None)):
            with serve(self.launch(file, pool, dtype="bfloat16")) as server:
                say(f"a crowd under {name}")
                started = time.perf_counter()
                answers = self._crowd(server)
                seconds[name] = time.perf_counter() - started
                if file is not None:
                    together = kvir_state(server)["peak_running"]
                    self.figures.add("crowd_at_once", together, ok=together >= CROWD)
            most = max(answer.retractions for answer in answers)
            self.figures.add(f"crowd_{name}_most_retractions", most, ok=name == "stock" or most <= 1)
            speed = CROWD * self.crowd_tokens / seconds[name]
            self.figures.add(f"crowd_{name}_tokens_per_second", f"{speed:.1f}")
        self.figures.add("crowd_vs_stock", f"{seconds['stock'] / seconds['kvir']:.2f}")

    def _crowd(self, server: Server) -> list[Served]:
        traffic = Traffic(server, self.ids)
        prompts = [traffic.cut(900 * i, CROWD_PROMPT) for i in range(CROWD)]
        return traffic.ask(prompts, self.crowd_tokens, concurrency=CROWD)

    def cost(self) -> None:
        """A trigger of one request in a batch of eight, whose triggers come one after another: the time of
        whole cycles of `every` steps over that of as many plain ones."""
        every, context, cycles = 64, 4096, 2
        file = self.file(every=every, cap=context, region="all", mass=0.99)
        with serve(self.launch(file, 10 * context)) as server:
            traffic = Traffic(server, self.ids)
            prompts = [traffic.cut(4000 * i, context - every) for i in range(8)]
            turns = [threading.Event() for _ in range(len(prompts) + 1)]
            turns[0].set()

            def one(i: int) -> list[float]:
                turns[i].wait()  # two steps after the request before it
                return stream_gaps(server, prompts[i], (cycles + 2) * every, then=turns[i + 1].set)

            with ThreadPoolExecutor(8) as pool:
                gaps, *_ = pool.map(one, range(len(prompts)))
        # from the first request's second trigger on, all eight run, and each triggers once in a cycle
        seen = gaps[2 * every : (2 + cycles) * every]
        step = statistics.median(seen)
        steps = (sum(seen) / cycles - every * step) / len(prompts) / step
        self.figures.add("trigger_step_ms", f"{step * 1e3:.0f}")
        self.figures.add("trigger_cost_in_steps", f"{steps:.2f}", ok=steps < 2)

    def quality(self, mass: float, cap: int) -> None:
        head_adaptive.compare(self.figures, mass, cap, self.model, self._answers)

    def _answers(self, name: str, rules: str) -> long_answers.Long:
        """What a policy makes of the given answers; kept, by its text."""
        policy = f"kvir: 1\nname: bench\nrules:\n{rules}"
        return head_adaptive.Kept(self.answers).get(policy, lambda: self._served_answers(name, policy))

    def _served_answers(self, name: str, policy: str) -> long_answers.Long:
        asked = long_answers.requests(Harness(self.model), ANSWERS)
        path = self.folder / f"{name}.ir"
        path.write_text(policy)
        tokens = long_answers.PROMPT_TOKENS + long_answers.ANSWER_TOKENS + 32
        launch = replace(
            self.launch(path, len(asked) * tokens),
            arguments=(*VARIANTS["overlap"][0], *forced.ARGUMENTS),
            max_running_requests=len(asked),
            # a prompt in two chunks would go through the logit processor twice
            chunked_prefill_tokens=2 * len(asked) * long_answers.PROMPT_TOKENS,
        )
        with serve(launch) as server:
            say(f"{name}: {len(asked)} answers")
            return long_answers.measure(server, asked, self.folder)

    def parts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for metric in METRICS:
            for mass in MASSES:
                for every in EVERY:
                    for overflow in OVERFLOWS:
                        given = metric, mass, every, overflow
                        yield ":".join(map(str, given)), lambda g=given: self.served(*g)
        yield "memory", self.memory
        yield "crowd", self.crowd
        yield "cost", self.cost
        for mass, cap in head_adaptive.BUDGETS:
            yield f"quality:{mass}:{cap}", lambda m=mass, c=cap: self.quality(m, c)


def stream_gaps(
    server: Server, prompt: Sequence[int], new_tokens: int, then: Callable[[], None]
) -> list[float]:
    """Seconds before each streamed token, the first counted from the request; `then` after the second."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        "stream": True,
    }
    gaps, before = list[float](), time.perf_counter()
    with httpx.stream("POST", server.url + "/generate", json=body, timeout=1800, trust_env=False) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                gaps.append(now - before)
                before = now
                if len(gaps) == 2:
                    then()
    return gaps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="what to run (all)")
    parser.add_argument("--list", action="store_true", help="names of the parts")
    parser.add_argument("--tiny", action="store_true", help="a small random model, for the METRIC parts")
    parser.add_argument("--threads", type=int, default=2, help="OpenMP threads of servers and oracle (2)")
    parser.add_argument(
        "--crowd-tokens", type=int, default=CROWD_TOKENS, help="generated by each (%(default)s)"
    )
    parser.add_argument(
        "--answers", type=Path, default=Path("out/hardkv"), metavar="DIR", help="of `quality` (%(default)s)"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder:
        run_parts(parser, options, dict(Bench(figures, Path(folder), options).parts()), figures)


if __name__ == "__main__":
    main()
