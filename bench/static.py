"""Static policies on a real model, end to end: served tokens and log-probabilities against the oracle, memory
against the planner, sharing, and the identity policy against stock SGLang.

    make bench-static                                 everything, about an hour on two cores
    python -m bench.static uniform:retract sharing    some parts (--list names them)

Traffic of a policy part: eight prompts of 30 to 1,500 tokens at once, lengths around pages and chunks, chats
of three turns, a shared prefix of 1,000 tokens and branches from it, a prefix that its writer left behind.
Variants: `overlap`; `plain` is without overlap scheduling; `retract` takes requests back every few steps.
Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch

from bench.parts.figures import Figures, run_parts, say
from bench.parts.variants import variants
from evaluation.agree import token_stream
from evaluation.models import model_path
from evaluation.oracle import LOGPROB_TOLERANCE, Agreement, Forced, Masks, Oracle, check
from evaluation.server import Launch, Served, serve
from evaluation.traffic import (
    Traffic,
    edges,
    eight,
    found_again,
    page_floor,
    passed_prefix,
    second_turns,
    shared_prefix,
)
from evaluation.watch import kvir_state
from kvir.lowering import footprint
from kvir.lowering.load import plan_for_server
from kvir.lowering.stages import ExecutionPlan

ROOT = Path(__file__).resolve().parent.parent
CHUNK_TOKENS = 256
POLICIES = {
    "uniform": ROOT / "tests/data/policies/uniform.ir",
    "headwise": ROOT / "examples/headwise_smollm2.ir",
    "ramp": ROOT / "examples/layer_ramp.ir",
    "narrow": ROOT / "tests/data/policies/narrow.ir",
}
PHASED = ROOT / "tests/data/policies/phased.ir"
TIGHT = ROOT / "tests/data/policies/tight.ir"
IDENTITY = ROOT / "examples/identity.ir"
VARIANTS = variants(retract_every=11)
EDGE_LENGTHS = (15, 16, 17, 255, 256, 257, 272)
LONG_TOKENS, LONG_NEW_TOKENS, AT_ONCE = 6000, 48, 6
SYSTEM_TOKENS, USERS = 1000, 10


class Remembering:
    """An oracle that is asked once for every request, however many servers gave that answer."""

    def __init__(self, model: Path, plan: ExecutionPlan) -> None:
        self._oracle = Oracle(model, Masks.of(plan.budgeted))
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Forced] = {}

    def force(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Forced:
        key = tuple(prompt_ids), tuple(output_ids)
        if key not in self._known:
            self._known[key] = self._oracle.force(prompt_ids, output_ids)
            say(f"oracle: {len(self._known)} requests, the last of {len(prompt_ids)} tokens")
        return self._known[key]


class Bench:
    def __init__(self, figures: Figures, threads: int) -> None:
        self.figures = figures
        self.threads = threads
        self.model = model_path("smollm2")
        self.ids = token_stream(self.model)
        self.plan = cache(lambda file: plan_for_server(file, self.model, dtype="float32"))
        self._oracle = cache(lambda file: Remembering(self.model, self.plan(file)))

    def launch(self, policy: Path | None, pool_tokens: int, variant: str = "overlap") -> Launch:
        arguments, environment = VARIANTS[variant]
        return Launch(
            model=self.model,
            kv_ir=policy,
            max_total_tokens=pool_tokens,
            chunked_prefill_tokens=CHUNK_TOKENS,
            threads=self.threads,
            arguments=arguments,
            environment=environment,
        )

    def check(self, policy: Path, served: Sequence[Served]) -> Agreement:
        return check(self._oracle(policy), served)  # type: ignore[arg-type]  it forces as an Oracle does

    # ---- parts ---------------------------------------------------------------------------------------------

    def identity(self) -> None:
        """`keep: all` against stock SGLang, same flags: 64 greedy tokens of eight prompts at once."""
        answers: list[list[Served]] = []
        for policy in (None, IDENTITY):
            with serve(self.launch(policy, 8192)) as server:
                say(f"serving {policy.name if policy else 'stock'}")
                answers.append(eight(Traffic(server, self.ids)))
        stock, ours = answers
        tokens = [
            a == b
            for mine, theirs in zip(ours, stock, strict=True)
            for a, b in zip(mine.output_ids, theirs.output_ids, strict=True)
        ]
        worst = max(
            abs(a - b)
            for mine, theirs in zip(ours, stock, strict=True)
            for best, stock_best in zip(mine.top, theirs.top, strict=True)
            for (_, a), (_, b) in zip(best, stock_best, strict=True)
        )
        self.figures.add("identity_tokens_equal", f"{sum(tokens)}/{len(tokens)}", ok=all(tokens))
        self.figures.add("identity_worst_top5_logprob", f"{worst:.1e}", ok=worst <= LOGPROB_TOLERANCE)

    def policy(self, name: str, file: Path, variant: str) -> None:
        label = f"{name}_{variant}"
        with serve(self.launch(file, 8192, variant)) as server:
            say(f"serving {label}")
            traffic = Traffic(server, self.ids)
            eight(traffic)
            edges(traffic, lengths=EDGE_LENGTHS)
            chats = second_turns(traffic, lengths=(100, 304))
            server.flush_cache()
            branches, _ = shared_prefix(traffic, branches=4)
            passed_prefix(traffic, 1200, new_tokens=24, steps=2, others=1)
            state = kvir_state(server)
        say(f"{label}: {len(traffic.served)} requests served")
        self.figures.agreement(label, self.check(file, traffic.served))
        prompts_only = self.plan(file).budgeted.prefill != self.plan(file).budgeted.decode
        turns = [(turn.cached_tokens, before) for chat in chats for before, turn in pairwise(chat)]
        expected = [
            page_floor(len(before.prompt_ids)) if prompts_only else found_again(before) for _, before in turns
        ]
        found = [cached for cached, _ in turns]
        self.figures.add(f"{label}_second_turns_cached", _listed(found), ok=found == expected)
        later = [answer.cached_tokens for answer in branches[2:]]
        self.figures.add(
            f"{label}_branches_cached",
            _listed([answer.cached_tokens for answer in branches]),
            ok=all(cached == page_floor(1000) for cached in later),
        )
        retractions = sum(answer.retractions for answer in traffic.served)
        self.figures.add(f"{label}_retractions", retractions, ok=(retractions > 0) == (variant == "retract"))
        pages = state["head_pages"]
        self.figures.add(f"{label}_peak_share", f"{pages['peak_covered'] / pages['peak_full_kv']:.3f}")

    def memory(self) -> None:
        """A prompt of 6,000 tokens in a pool of 1,024, within the planner's numbers; stock refuses it."""
        peak = footprint.peak_pages(self.plan(TIGHT).layout, LONG_TOKENS + LONG_NEW_TOKENS)
        with serve(self.launch(TIGHT, 1024)) as server:
            answer = Traffic(server, self.ids).one_by_one([self.ids[:LONG_TOKENS]], LONG_NEW_TOKENS)[0]
            pages = kvir_state(server)["head_pages"]
        self.figures.add(
            "long_prompt_head_pages_of_planned",
            f"{pages['peak_covered']}/{peak}",
            ok=pages["peak_covered"] == peak,
        )
        self.figures.add("long_prompt_pool_head_pages", pages["pool"])
        self.figures.add("long_prompt_full_kv_head_pages", pages["peak_full_kv"])
        self.figures.agreement("long_prompt", self.check(TIGHT, [answer]))
        with serve(self.launch(None, 1024)) as server:
            body = {"input_ids": self.ids[:LONG_TOKENS], "sampling_params": {"max_new_tokens": 8}}
            status = server.client.post("/generate", json=body).status_code
        self.figures.add("long_prompt_stock_status", status, ok=status == 400)

    def six(self) -> None:
        """Six prompts of 6,000 tokens at once in the same pool."""
        layout = self.plan(TIGHT).layout
        peak = AT_ONCE * footprint.peak_pages(layout, LONG_TOKENS + LONG_NEW_TOKENS)
        with serve(self.launch(TIGHT, 1024)) as server:
            traffic = Traffic(server, self.ids)
            prompts = [traffic.cut(6500 * i, LONG_TOKENS) for i in range(AT_ONCE)]
            answers = traffic.ask(prompts, LONG_NEW_TOKENS, concurrency=AT_ONCE)
            state = kvir_state(server)
        pages, together = state["head_pages"], state["peak_running"]
        self.figures.add("six_at_once", together, ok=together == AT_ONCE)
        self.figures.add(
            "six_head_pages_of_planned", f"{pages['peak_covered']}/{peak}", ok=pages["peak_covered"] <= peak
        )
        self.figures.add("six_pool_head_pages", pages["pool"], ok=peak <= pages["pool"])
        self.figures.agreement("six", self.check(TIGHT, answers[-1:]))

    def sharing(self) -> None:
        """Ten users of one system prompt, one after another, windows of 256; then others take the memory."""
        file = POLICIES["uniform"]
        with serve(self.launch(file, 4096)) as server:
            traffic = Traffic(server, self.ids)
            users, _ = shared_prefix(traffic, SYSTEM_TOKENS, branches=USERS)
            traffic.one_by_one([traffic.cut(20_000 + 3000 * i, 2500) for i in range(4)], 4)
            late = traffic.one_by_one([traffic.cut(3000, SYSTEM_TOKENS) + traffic.cut(99, 40)], 16)[0]
            state = kvir_state(server)
        cached = [user.cached_tokens for user in users]
        self.figures.add("sharing_cached_by_user", _listed(cached), ok=min(cached[2:]) >= 960)
        self.figures.add("sharing_tombstoned_cells", state["metrics"]["kvir_tombstoned"])
        self.figures.add("sharing_cached_under_pressure", late.cached_tokens, ok=late.cached_tokens >= 960)
        self.figures.agreement("sharing", self.check(file, [users[1], users[2], users[-1], late]))


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def parts(bench: Bench) -> Iterator[tuple[str, Callable[[], None]]]:
    yield "identity", bench.identity
    for name, file in POLICIES.items():
        for variant in VARIANTS:
            yield f"{name}:{variant}", lambda n=name, f=file, v=variant: bench.policy(n, f, v)
    # a request that was taken back is prefilled anew, outputs and all: its phases are other ones
    yield "phased:overlap", lambda: bench.policy("phased", PHASED, "overlap")
    yield "memory", bench.memory
    yield "six", bench.six
    yield "sharing", bench.sharing


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
    available = dict(parts(Bench(figures, options.threads)))
    run_parts(parser, options, available, figures)


if __name__ == "__main__":
    main()
