"""Rows by score on a real model, served: against the oracle, and memory against the planner.

    make bench-served                          everything, about an hour on two cores
    python -m bench.served h2o:retract memory  some parts (--list names them)

Traffic of a policy part, in chunks of 256: six prompts of 40 to 1,000 tokens at once, a chat of three turns,
a shared prefix and branches from it.  `retract` takes requests back every few steps: each selects again at
its new length.  `memory`: a prompt of 4,096 tokens at 10 %, and what stays of it in the prefix cache.
`blocks`: the peak of a prompt that is cut after every block.  Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench.parts.figures import Figures, run_parts, say
from bench.parts.variants import variants
from evaluation.agree import token_stream
from evaluation.models import model_path
from evaluation.oracle import check
from evaluation.rounding import ties
from evaluation.selection_oracle import SelectionOracle, replays
from evaluation.server import Launch, serve
from evaluation.traffic import Traffic, page_floor, second_turns, shared_prefix
from evaluation.watch import kvir_state, prefills
from kvir.lowering import footprint
from kvir.lowering.load import plan_for_server
from kvir.lowering.stages import ExecutionPlan
from kvir.sglang_ext.selecting_rules import observed_at_prompt_end

ROOT = Path(__file__).resolve().parent.parent
CHUNK_TOKENS, POOL_TOKENS = 256, 6144
LENGTHS = (40, 100, 255, 400, 700, 1000)
QUARTER = "fraction: 0.25, counts: kept"
INSIDE = "{sink: 4}, {recent: 32}"
SNAPKV = "by: {attention: {pool: {max: 7}}}"
POLICIES = {
    "snapkv": f"keep: [{INSIDE}, {{top_k: {{{QUARTER}, {SNAPKV}}}}}]",
    "h2o": f"keep: [{INSIDE}, {{top_k: {{{QUARTER}, by: accumulated}}}}]",
    "tova": f"keep: {{top_k: {{{QUARTER}, by: last_query, tie: layer}}}}",
    "keydiff_blocks": "keep: {top_k: {tokens: 256, counts: kept, by: key_diff}}, "
    "trigger: {prefill_chunk: {tokens: 128}}",
    "pyramidkv": f"keep: [{INSIDE}, {{top_k: {{ramp: 256, counts: kept, {SNAPKV}}}}}]",
    "adakv": f"keep: [{INSIDE}, {{top_k: {{{QUARTER}, {SNAPKV}, scope: layer, safeguard: {{blend: 0.2}}}}}}]",
    "laprox_model": f"keep: [{INSIDE}, {{top_k: {{fraction: 0.1, counts: kept, by: laprox, scope: model}}}}]",
}
MIXED = ROOT / "tests/data/policies/mixed_methods.ir"
VARIANTS = {name: how for name, how in variants(retract_every=11).items() if name != "plain"}
LONG_TOKENS = 4096
TENTH = f"keep: [{INSIDE}, {{top_k: {{fraction: 0.1, counts: kept, {SNAPKV}}}}}]"


class Bench:
    def __init__(self, figures: Figures, folder: Path, threads: int) -> None:
        self.figures, self.folder, self.threads = figures, folder, threads
        self.model = model_path("smollm2")
        self.ids = token_stream(self.model)

    def file(self, name: str, rule: str) -> Path:
        path = self.folder / f"{name}.ir"
        path.write_text(f"kvir: 1\nname: {name.replace('_', '-')}\nrules:\n  - {{{rule}}}\n")
        return path

    def plan(self, file: Path) -> ExecutionPlan:
        return plan_for_server(file, self.model, dtype="float32")

    def launch(self, file: Path, pool_tokens: int, variant: str = "overlap") -> Launch:
        arguments, environment = VARIANTS[variant]
        return Launch(
            model=self.model,
            kv_ir=file,
            max_total_tokens=pool_tokens,
            chunked_prefill_tokens=CHUNK_TOKENS,
            threads=self.threads,
            arguments=arguments,
            environment=environment,
        )

    # ---- parts ---------------------------------------------------------------------------------------------

    def policy(self, name: str, variant: str) -> None:
        file = MIXED if name == "mixed" else self.file(name, POLICIES[name])
        label = f"{name}_{variant}"
        with serve(self.launch(file, POOL_TOKENS, variant)) as server:
            say(f"serving {label}")
            traffic = Traffic(server, self.ids)
            traffic.ask([traffic.cut(1777 * i, n) for i, n in enumerate(LENGTHS)], 40, concurrency=6)
            second_turns(traffic, lengths=(304,))
            branches, _ = shared_prefix(traffic, 600, branches=2)
            state, lengths = kvir_state(server), prefills(server)
        asked = replays(traffic.served, lengths)
        say(f"{label}: {len(traffic.served)} requests served, asking the oracle about {len(asked)}")
        oracle = SelectionOracle(self.model, self.plan(file))
        self.figures.agreement(label, check(oracle, asked), lambda: ties(oracle, asked))
        counters = state["counters"]
        self.figures.add(f"{label}_selections", counters["selections"], ok=counters["selections"] > 0)
        self.figures.add(f"{label}_rows_evicted", counters["rows_evicted"], ok=counters["rows_evicted"] > 0)
        cached = branches[1].cached_tokens
        # a score of all queries computes all of them: nothing of its prompt comes from the cache
        findable = observed_at_prompt_end(self.plan(file)) is not None
        self.figures.add(f"{label}_branch_cached", cached, ok=(cached > 0) == findable)
        retractions = sum(answer.retractions for answer in traffic.served)
        self.figures.add(f"{label}_retractions", retractions, ok=(retractions > 0) == (variant == "retract"))

    def memory(self) -> None:
        """SnapKV at 10 % of 4,096 tokens: head-pages to the page; the prefix stays while there is room."""
        file = self.file("tenth", TENTH)
        layout = self.plan(file).layout
        with serve(self.launch(file, 2 * LONG_TOKENS)) as server:
            traffic = Traffic(server, self.ids)
            prompt = traffic.cut(0, LONG_TOKENS)
            traffic.one_by_one([prompt], 2)  # the selection, and one step
            held = kvir_state(server)["finished"][-1]["head_pages_held"]
            planned = footprint.done_pages(layout, LONG_TOKENS + 1, LONG_TOKENS)
            again = traffic.one_by_one([prompt], 2)[0].cached_tokens
            traffic.ask([traffic.cut(9_000 * i, LONG_TOKENS) for i in (1, 2)], 2, concurrency=1)
            late = traffic.one_by_one([prompt], 2)[0].cached_tokens
        exact = planned.least == planned.most == held
        self.figures.add("resident_head_pages_of_planned", f"{held}/{planned.most}", ok=exact)
        self.figures.add("resident_share", f"{held / footprint.full_pages(layout, LONG_TOKENS):.4f}")
        self.figures.add("prefix_cached_tokens", again, ok=again == page_floor(LONG_TOKENS - 32))
        self.figures.add("prefix_cached_tokens_under_pressure", late, ok=late < again)

    def blocks(self) -> None:
        """KeyDiff after every 128 tokens: the peak is the budget and one chunk of the server."""
        file = self.file("keydiff_blocks", POLICIES["keydiff_blocks"])
        layout = self.plan(file).layout
        with serve(self.launch(file, LONG_TOKENS)) as server:
            Traffic(server, self.ids).one_by_one([self.ids[:LONG_TOKENS]], 2)
            pages = kvir_state(server)["head_pages"]
        full = footprint.full_pages(layout, LONG_TOKENS)
        most = (256 // 16 + CHUNK_TOKENS // 16 + 2) * layout.unit_count
        peak = pages["peak_covered"]
        self.figures.add("blocks_peak_head_pages", f"{peak} of {most} (full KV {full})", ok=peak <= most)

    def parts(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for name in (*POLICIES, "mixed"):
            for variant in VARIANTS:
                yield f"{name}:{variant}", lambda n=name, v=variant: self.policy(n, v)
        yield "memory", self.memory
        yield "blocks", self.blocks


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="what to run (all)")
    parser.add_argument("--list", action="store_true", help="names of the parts")
    parser.add_argument("--threads", type=int, default=2, help="OpenMP threads of server and oracle (2)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures = Figures()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(figures, Path(folder), options.threads)
        run_parts(parser, options, dict(bench.parts()), figures)


if __name__ == "__main__":
    main()
