"""Calibrated plans, served and as masks: quality against full KV, bytes, and the longest request.

    make bench-headwise                                  everything, about two hours on two cores
    python -m bench.headwise score:plan score --minutes 9

Parts (--list names them):

score:full, score:plan, score:sinkless   five needle tasks at two lengths, a server each: full KV (identity
    policy), the plan, and, with fewer items, a plan of equal size without sinks.  Answers are kept in
    `out/headwise`, so with --minutes a part goes on where it stopped.
score       of the answers so far: `headwise_score_vs_full`, the ratio of the means over the same items
oracle      what is served under the plan against the oracle, float32, and its bytes against the planner
longest     the longest request in equal pools; 1 if every byte that the plan saves becomes context
quarter     a plan of 25 % of 1,024 tokens, as masks: needles aware and agnostic of the question, and loss
gemma       Gemma 3 under the identity policy against stock SGLang: bytes held at 8,192 tokens, and tokens
gemma:full, gemma:plan, gemma:score      as `score`, for the plan of its global layers

The gemma parts download Gemma-3-270M when they first run.  Exit code 1: something is not as it must be.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench.parts import gemma
from bench.parts.answers import Answers, Question, needles
from bench.parts.figures import Figures, run_parts, say
from bench.parts.longest import longest_prompt
from bench.parts.masks import quality
from evaluation.agree import token_stream
from evaluation.models import model_path
from evaluation.oracle import LOGPROB_TOLERANCE, Masks, Oracle, check
from evaluation.server import Launch, serve
from evaluation.watch import kvir_state
from kvir.evals.answers import evicted_share, retained
from kvir.evals.command import form_of
from kvir.evals.outcome import Mean, Scored, summarise
from kvir.evals.prompts import turn_ids
from kvir.lowering import footprint
from kvir.lowering.load import plan_for_server
from kvir.lowering.model_facts import load_model

ROOT = Path(__file__).resolve().parents[1]
IDENTITY = ROOT / "examples/identity.ir"
PLAN = ROOT / "examples/headwise_smollm2.ir"
QUARTER = ROOT / "examples/headwise_smollm2_quarter.ir"
SINKLESS = ROOT / "tests/data/policies/headwise_smollm2_sinkless.ir"
GEMMA_PLAN = ROOT / "examples/headwise_gemma3.ir"

LENGTHS = (2048, 4096)
ITEMS, SINKLESS_ITEMS = 20, 5  # of a task at a length
POOL_TOKENS = 24_576  # four of the longest prompts at once, and their cache
LONGEST_POOL_TOKENS = 2048  # small, so that the model's own limit does not end it
QUARTER_TOKENS, QUARTER_NEEDLES, QUARTER_TEXTS = 1024, 40, 14
GEMMA_TOKENS, GEMMA_NEW_TOKENS, GEMMA_ITEMS = 8192, 32, 3


def kept_share(model: Path, plan: Path) -> Callable[[int], float]:
    """Prompt tokens -> share of the rows that stay, of all layers that have a choice."""
    _, decode = retained(model, plan)
    sizes = {
        layer.layer_id: layer.head_dim
        for layer in load_model(model).layers
        if layer.native_window_tokens is None
    }
    chosen = {layer_id: row for layer_id, row in decode.items() if layer_id in sizes}
    return lambda tokens: 1 - evicted_share(chosen, sizes, tokens)


@dataclass(frozen=True)
class Contest:
    """Plans of one model that answer the same questions."""

    name: str  # of the figures
    model: Path
    per_task: int
    dtype: str = "float32"  # on a CPU without bfloat16 units a matrix product takes a seventh of the time
    threads: int = 2

    def questions(self) -> list[Question]:
        form = form_of("auto", str(self.model), agnostic=False)
        return needles(self.model, form, LENGTHS, self.per_task)

    def answers(self, plan: Path) -> Answers:
        launch = Launch(
            model=self.model,
            kv_ir=plan,
            dtype=self.dtype,
            max_total_tokens=POOL_TOKENS,
            chunked_prefill_tokens=2048,
            threads=self.threads,
        )
        return Answers(launch)

    def scored(self, plan: Path) -> list[Scored]:
        """The items that the plan and full KV have both answered."""
        full, ours = self.answers(IDENTITY).known(), self.answers(plan).known()
        share = kept_share(self.model, plan)
        made: list[Scored] = []
        for question in self.questions():
            item, mine, base = question.item, ours.get(question.name), full.get(question.name)
            if mine is None or base is None:
                continue
            made.append(
                Scored(
                    task=item.task,
                    tokens=question.tokens,
                    number=item.number,
                    prompt_tokens=mine.prompt_tokens,
                    evicted_share=1 - share(mine.prompt_tokens),
                    references=item.references,
                    answer=mine.text,
                    score=item.score(mine.text),
                    baseline_answer=base.text,
                    baseline_score=item.score(base.text),
                )
            )
        return made


class Bench:
    def __init__(self, figures: Figures, options: argparse.Namespace) -> None:
        self.figures = figures
        self.minutes: float = options.minutes
        self.threads: int = options.threads
        self.backwards: bool = options.backwards

    @property
    def smollm2(self) -> Contest:
        return Contest("headwise", model_path("smollm2"), ITEMS, threads=self.threads)

    @property
    def sinkless(self) -> Contest:
        """The first of the same questions."""
        return replace(self.smollm2, name="sinkless", per_task=SINKLESS_ITEMS)

    @property
    def gemma3(self) -> Contest:
        return Contest("gemma3", model_path("gemma3"), GEMMA_ITEMS, threads=self.threads)

    def ask(self, contest: Contest, plan: Path) -> None:
        questions = contest.questions()[:: -1 if self.backwards else 1]
        left = contest.answers(plan).ask(questions, self.minutes, say)
        if left:
            say(f"{left} questions are left: run this part again")

    def score(self, contest: Contest, plan: Path, name: str) -> None:
        """Shares and scores so far; only a whole set of answers gives figures of the bench."""
        scored, asked = contest.scored(plan), len(contest.questions())
        if len(scored) < asked:
            say(f"{name}: {len(scored)} of {asked} questions are answered by both")
        if not scored:
            return
        rows, _ = summarise(scored)
        for row in rows:
            of = f" of {row.baseline.mean:.3f}" if row.baseline else ""
            say(f"{name}: {row.task} at {row.tokens}: {row.score.mean:.3f}{of}, {row.score.items} items")
        if len(scored) == asked:
            share = kept_share(contest.model, plan)
            for tokens in LENGTHS:
                self.figures.add(f"{name}_kept_{tokens}", f"{share(tokens):.4f}")
            self.figures.add(f"{name}_kept", f"{max(map(share, LENGTHS)):.4f}")
            total = rows[-1]
            assert total.baseline is not None
            assert total.ratio is not None
            self.figures.add(f"{name}_score", _interval(total.score))
            self.figures.add(f"{name}_full_score", _interval(total.baseline))
            self.figures.add(f"{name}_score_vs_full", _interval(total.ratio))

    def scores(self) -> None:
        self.score(self.smollm2, PLAN, "headwise")
        self.score(self.sinkless, SINKLESS, "sinkless")

    def oracle(self) -> None:
        """The first question of each task and length, one by one, then the same at once."""
        contest = replace(self.smollm2, per_task=1)
        tokenizer = _tokenizer(contest.model)
        prompts = [turn_ids(tokenizer, question.turns[-1]) for question in contest.questions()]
        launch = replace(contest.answers(PLAN).launch, dtype="float32", threads=self.threads)
        layout = plan_for_server(PLAN, contest.model, dtype="float32").layout
        longest = max(prompts, key=len)
        with serve(launch) as server:
            served = [server.generate(longest, 32)]
            held = kvir_state(server)["head_pages"]["peak_covered"]
            served += server.generate_all([p for p in prompts if p is not longest], 32, concurrency=4)
        say(f"{len(served)} requests served; asking the oracle")
        planned = footprint.peak_pages(layout, len(longest) + 32)
        self.figures.add("headwise_head_pages_of_planned", f"{held}/{planned}", ok=held == planned)
        masks = Masks.of(plan_for_server(PLAN, contest.model, dtype="float32").budgeted)
        agreement = check(Oracle(contest.model, masks), served, say)
        self.figures.agreement("headwise", agreement)

    def longest(self) -> None:
        model = model_path("smollm2")
        limit = load_model(model).context_tokens - 2
        small = Launch(
            model=model, dtype="float32", threads=self.threads, max_total_tokens=LONGEST_POOL_TOKENS
        )
        stock = longest_prompt(small, limit)
        ours = longest_prompt(replace(small, kv_ir=PLAN), limit)
        share = kept_share(model, PLAN)(ours)
        self.figures.add("longest_context_stock_tokens", stock)
        self.figures.add("longest_context_kvir_tokens", ours)
        self.figures.add("longest_context_kept", f"{share:.4f}")
        self.figures.add("longest_context_vs_stock_times_kept", f"{ours / stock * share:.4f}")

    def quarter(self) -> None:
        torch.set_num_threads(self.threads)
        model = model_path("smollm2")
        sizes = QUARTER_TOKENS, QUARTER_NEEDLES, QUARTER_TEXTS
        full, plan = (quality(model, file, *sizes) for file in (None, QUARTER))
        self.figures.add("quarter_kept", f"{kept_share(model, QUARTER)(QUARTER_TOKENS):.4f}")
        self.figures.add("quarter_needles_aware", f"{plan.aware:.3f} (full KV {full.aware:.3f})")
        self.figures.add("quarter_needles_agnostic", f"{plan.agnostic:.3f} (full KV {full.agnostic:.3f})")
        self.figures.add("quarter_loss_over_full", f"{plan.loss - full.loss:.4f}")

    def gemma(self) -> None:
        model = model_path("gemma3")
        prompt = [*_tokenizer(model)("").input_ids, *token_stream(model)]
        prompt = prompt[: GEMMA_TOKENS - GEMMA_NEW_TOKENS]
        launch = Launch(
            model=model,
            max_total_tokens=GEMMA_TOKENS + 1024,
            chunked_prefill_tokens=1024,
            threads=self.threads,
        )
        stock = gemma.stock(launch, prompt, GEMMA_NEW_TOKENS)
        say(f"stock answered: {stock.answer.text!r}")
        ours = gemma.kvir(replace(launch, kv_ir=IDENTITY), prompt, GEMMA_NEW_TOKENS)
        pairs = list(zip(ours.answer.output_ids, stock.answer.output_ids, strict=True))
        equal = sum(a == b for a, b in pairs)
        self.figures.add("gemma3_tokens_equal", f"{equal}/{len(pairs)}", ok=equal == len(pairs))
        logprobs = zip(ours.answer.logprobs, stock.answer.logprobs, strict=True)
        worst = max(abs(a - b) for a, b in logprobs)
        self.figures.add("gemma3_worst_logprob", f"{worst:.1e}", ok=worst <= LOGPROB_TOLERANCE)
        self.figures.add("gemma3_resident_bytes", ours.bytes_held)
        self.figures.add("gemma3_stock_bytes", stock.bytes_held)
        self.figures.add("gemma3_resident_vs_stock", f"{ours.bytes_held / stock.bytes_held:.4f}")

    def parts(self) -> dict[str, Callable[[], None]]:
        return {
            "score:full": lambda: self.ask(self.smollm2, IDENTITY),
            "score:plan": lambda: self.ask(self.smollm2, PLAN),
            "score:sinkless": lambda: self.ask(self.sinkless, SINKLESS),
            "score": self.scores,
            "oracle": self.oracle,
            "longest": self.longest,
            "quarter": self.quarter,
            "gemma": self.gemma,
            "gemma:full": lambda: self.ask(self.gemma3, IDENTITY),
            "gemma:plan": lambda: self.ask(self.gemma3, GEMMA_PLAN),
            "gemma:score": lambda: self.score(self.gemma3, GEMMA_PLAN, "gemma3"),
        }


def _interval(mean: Mean) -> str:
    return f"{mean.mean:.4f} [{mean.low:.3f}, {mean.high:.3f}]"


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="what to run (all)")
    parser.add_argument("--list", action="store_true", help="names of the parts")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="of asking, in one part (no limit)"
    )
    parser.add_argument("--threads", type=int, default=2, help="OpenMP threads of servers and masks (2)")
    parser.add_argument(
        "--backwards", action="store_true", help="ask from the end, beside a process that does not"
    )
    options = parser.parse_args()
    figures = Figures()
    available = Bench(figures, options).parts()
    run_parts(parser, options, available, figures)


if __name__ == "__main__":
    main()
