"""A calibrated plan, served: quality against full KV on needle tasks, and the longest request in equal pools.

    python -m bench.headwise [--plan examples/headwise_smollm2.ir] [--items 20] [--lengths 2048,4096]

One server at a time: stock SGLang, then kvir with the plan.  `headwise_kept` is the share of the rows that
the plan keeps of the longest prompts; `headwise_score_vs_full` the ratio of the mean scores over 5 needle
tasks.  `longest_context_vs_stock_times_kept` is (longest request with kvir / with stock) * kept share there,
1 if every byte that the plan saves is turned into context.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from evaluation.models import model_path
from evaluation.server import Launch, Server, ServerError, serve
from kvir.calibration.options import count, numbers
from kvir.evals.answers import Server as Chat
from kvir.evals.answers import chat, evicted_share, retained
from kvir.evals.command import most_tokens, prompt_counter
from kvir.evals.outcome import Scored, summarise
from kvir.evals.tasks import GROUPS, Item, make, paragraphs
from kvir.lowering.model_facts import load_model

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "data/wikipedia_valid.txt"
POOL_TOKENS = 2048  # for the longest request: small, so that the model's own limit does not end it
STEP_TOKENS = 32


def items(model: Path, lengths: tuple[int, ...], per_task: int) -> list[Item]:
    text = paragraphs(TEXT.read_text(encoding="utf-8"))
    tokens = prompt_counter(str(model), agnostic=False)
    return [
        make(task, length - most_tokens(task), number, 0, text, tokens)
        for task in GROUPS["needles"]
        for length in lengths
        for number in range(per_task)
    ]


def answers(launch: Launch, asked: list[Item]) -> list[tuple[str, int]]:
    """(answer, prompt tokens) of every item, from a server of its own."""
    with serve(launch) as server:
        client = Chat(server.url)
        found: list[tuple[str, int]] = []
        for item in asked:
            turns = chat(item.instruction, item.context, item.question, agnostic=False)
            answer = client.answer(turns, most_tokens(item.task))
            found.append((answer.text, answer.prompt_tokens))
        return found


def longest(launch: Launch, limit: int) -> int:
    """The longest prompt in tokens, to a multiple of 32, that is served with one token of answer."""
    with serve(launch) as server:
        low, high = STEP_TOKENS, limit + STEP_TOKENS
        while high - low > STEP_TOKENS:
            middle = (low + high) // 2 // STEP_TOKENS * STEP_TOKENS
            low, high = (middle, high) if served(server, middle) else (low, middle)
        return low


def served(server: Server, tokens: int) -> bool:
    try:
        answer = server.generate([5 + i % 1000 for i in range(tokens)], 1, top_logprobs=1)
    except ServerError:
        if not server.alive():
            raise
        return False
    finally:
        server.flush_cache()
    return len(answer.output_ids) == 1


def kept(model: Path, plan: Path) -> Callable[[int], float]:
    """Prompt tokens -> share of the rows that stay."""
    _, decode = retained(model, plan)
    sizes = {layer.layer_id: layer.head_dim for layer in load_model(model).layers}
    return lambda tokens: 1 - evicted_share(decode, sizes, tokens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", type=Path, default=ROOT / "examples/headwise_smollm2.ir")
    parser.add_argument("--items", type=count, default=20)
    parser.add_argument("--lengths", type=numbers, default=(2048, 4096))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", choices=("score", "longest"), help="a part of it")
    args = parser.parse_args()
    model = model_path("smollm2")
    share = kept(model, args.plan)
    print(f"bench: headwise_kept = {share(max(args.lengths)):.4f}")
    if args.only != "longest":
        score(args, model)
    if args.only != "score":
        context = load_model(model).context_tokens - 2
        pool = {"model": model, "dtype": args.dtype, "max_total_tokens": POOL_TOKENS}
        stock, ours = longest(Launch(**pool), context), longest(Launch(**pool, kv_ir=args.plan), context)
        print(f"bench: longest_context_stock_tokens = {stock}")
        print(f"bench: longest_context_kvir_tokens = {ours}")
        print(f"bench: longest_context_vs_stock_times_kept = {ours / stock * share(ours):.4f}")


def score(args: argparse.Namespace, model: Path) -> None:
    asked = items(model, args.lengths, args.items)
    full = answers(Launch(model=model, dtype=args.dtype, threads=2), asked)
    ours = answers(Launch(model=model, dtype=args.dtype, threads=2, kv_ir=args.plan), asked)
    scored = [
        Scored(
            task=item.task,
            tokens=item.tokens,
            number=item.number,
            prompt_tokens=tokens,
            evicted_share=None,
            references=item.references,
            answer=answer,
            score=item.score(answer),
            baseline_answer=baseline,
            baseline_score=item.score(baseline),
        )
        for item, (answer, tokens), (baseline, _) in zip(asked, ours, full, strict=True)
    ]
    total = summarise(scored)[0][-1]
    assert total.baseline is not None
    print(f"bench: headwise_score = {total.score.mean:.4f} [{total.score.low:.3f}, {total.score.high:.3f}]")
    print(
        f"bench: full_score = {total.baseline.mean:.4f} [{total.baseline.low:.3f}, {total.baseline.high:.3f}]"
    )
    if total.ratio is not None:
        print(f"bench: headwise_score_vs_full = {total.ratio.mean:.4f}")
        print(f"bench: headwise_score_vs_full_interval = {total.ratio.low:.3f}..{total.ratio.high:.3f}")


if __name__ == "__main__":
    main()
