"""`kvir eval`: from options to a table and a JSON file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress

from kvir import __version__
from kvir.evals.answers import Answerer, EvalError, Local, Server, evicted_share, retained
from kvir.evals.outcome import Mean, Outcome, Row, Scored, summarise
from kvir.evals.prompts import Form, Prompt, turn_ids
from kvir.evals.tasks import GROUPS, NEEDS_TEXT, TASKS, Item, make, paragraphs
from kvir.lowering.plan_file import write_atomically

FORMAT = 1
SHORT_ANSWER_TOKENS, LONG_ANSWER_TOKENS = 32, 96
CHARACTERS_PER_TOKEN = 4  # where there is no tokenizer


def evaluate(args: argparse.Namespace) -> None:
    """Run an evaluation, print its table, and write the JSON file.

    Raises:
        EvalError: options do not fit together, or a server fails.
        PolicyError: a plan does not fit the model.
    """
    tasks = _tasks(args)
    text = paragraphs(Path(args.text).read_text(encoding="utf-8")) if args.text else []
    form = form_of(args.prompts, args.model, agnostic=args.agnostic)
    count = prompt_counter(args.model, form)
    try:
        items = [
            make(task, tokens - most_tokens(task), number, args.seed, text, count)
            for task in tasks
            for tokens in args.lengths
            for number in range(args.items)
        ]
    except ValueError as error:
        raise EvalError(str(error)) from None
    lengths = [tokens for _ in tasks for tokens in args.lengths for _ in range(args.items)]
    evicted = _evicted(args)
    answerer, baseline = _answerers(args)
    scored = _run(args, form, items, lengths, answerer, baseline, evicted)
    rows, cut = summarise(scored)
    settings = {
        "answers": answerer.name,
        "baseline": baseline.name if baseline else None,
        **{name: getattr(args, name) for name in ("tasks", "lengths", "items", "seed", "agnostic", "plan")},
        "prompts": "chat" if form.chat else "plain",
        "text": Path(args.text).name if args.text else None,
    }
    outcome = Outcome(
        format=FORMAT, version=__version__, settings=settings, rows=rows, evicted=cut, items=tuple(scored)
    )
    if args.output:
        data = msgspec.json.format(msgspec.json.encode(outcome), indent=1)
        write_atomically(args.output, data + b"\n")
    print_table(outcome)


def _tasks(args: argparse.Namespace) -> list[str]:
    found: list[str] = []
    for name in args.tasks if isinstance(args.tasks, tuple) else (args.tasks,):
        if name not in TASKS and name not in GROUPS:
            near = get_close_matches(name, [*TASKS, *GROUPS], 1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise EvalError(f"unknown task `{name}`{hint} Known: {', '.join([*TASKS, *GROUPS])}")
        found += GROUPS.get(name, (name,))
    found = list(dict.fromkeys(found))
    without = sorted(NEEDS_TEXT & set(found))
    if without and not args.text:
        raise EvalError(f"give a --text for {', '.join(without)}: what the facts are hidden in")
    if args.items < 1:
        raise EvalError("--items is at least 1")
    return found


def most_tokens(task: str) -> int:
    """The longest answer."""
    short = task in ("passkey", "single", "multi-key", "reading")
    return SHORT_ANSWER_TOKENS if short else LONG_ANSWER_TOKENS


def form_of(prompts: str, model: str | None, *, agnostic: bool) -> Form:
    """`auto` is a chat unless the model's tokenizer has no template for one."""
    if prompts == "auto":
        return Form(model is None or _tokenizer(model).chat_template is not None, agnostic)
    return Form(prompts == "chat", agnostic)


def prompt_counter(model: str | None, form: Form) -> Callable[[Prompt], int]:
    """Tokens of the whole prompt of an item."""
    if model is None:
        return lambda p: len(p.instruction + p.context + p.question) // CHARACTERS_PER_TOKEN
    tokenizer = _tokenizer(model)
    return lambda prompt: len(turn_ids(tokenizer, form.turns(prompt)[-1]))


@cache
def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def _evicted(args: argparse.Namespace) -> Callable[[int], float | None]:
    """Prompt tokens -> share of the rows that are evicted, where a plan and a model say so."""
    if not (args.model and args.plan):
        return lambda _: None
    from kvir.lowering.model_facts import load_model

    _, decode = retained(Path(args.model), Path(args.plan))
    sizes = {layer.layer_id: layer.head_dim for layer in load_model(args.model).layers}
    return lambda tokens: evicted_share(decode, sizes, tokens)


def _answerers(args: argparse.Namespace) -> tuple[Answerer, Answerer | None]:
    if args.url:
        if args.baseline_plan:
            raise EvalError("--baseline-plan is for a local model; give a --baseline-url")
        other = Server(args.baseline_url, key=args.api_key) if args.baseline_url else None
        return Server(args.url, key=args.api_key), other
    if not args.model:
        raise EvalError("give the --url of a server, or the folder of a --model")
    from kvir.calibration.job import quiet

    quiet()

    def local(plan: str | None) -> Local:
        path = None if plan in (None, "full") else Path(str(plan))
        return Local(Path(args.model), path, device=args.device, dtype=args.dtype)

    return local(args.plan), local(args.baseline_plan) if args.baseline_plan else None


def _run(
    args: argparse.Namespace,
    form: Form,
    items: Sequence[Item],
    lengths: Sequence[int],
    answerer: Answerer,
    baseline: Answerer | None,
    evicted: Callable[[int], float | None],
) -> list[Scored]:
    def one(pair: tuple[Item, int]) -> Scored:
        item, tokens = pair
        turns = form.turns(item.prompt)
        most = most_tokens(item.task)
        found = answerer.answer(turns, most)
        other = baseline.answer(turns, most) if baseline else None
        return Scored(
            task=item.task,
            tokens=tokens,
            number=item.number,
            prompt_tokens=found.prompt_tokens,
            evicted_share=evicted(found.prompt_tokens),
            references=item.references,
            answer=found.text,
            score=item.score(found.text),
            baseline_answer=other.text if other else None,
            baseline_score=item.score(other.text) if other else None,
        )

    workers = 1 if isinstance(answerer, Local) else max(1, args.concurrency)
    scored: list[Scored] = []
    with Progress(console=Console(stderr=True)) as bar, ThreadPoolExecutor(workers) as pool:
        task = bar.add_task("items", total=len(items))
        try:
            for result in pool.map(one, zip(items, lengths, strict=True)):
                scored.append(result)
                bar.advance(task)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return scored


def print_table(outcome: Outcome, console: Console | None = None) -> None:
    """Scores with 95 % intervals; the evicted subset last."""
    from rich.table import Table

    title = str(outcome.settings["answers"])
    if outcome.settings["baseline"]:
        title += f" against {outcome.settings['baseline']}"
    table = Table(title=title, title_justify="left")
    for name in ("task", "tokens"):
        table.add_column(name)
    for name in ("items", "evicted", "score", "baseline", "difference", "ratio"):
        table.add_column(name, justify="right")
    for row in (*outcome.rows, *([outcome.evicted] if outcome.evicted else [])):
        table.add_row(*_cells(row))
    # a file or a pipe has no width of its own
    (console or Console(width=None if sys.stdout.isatty() else 130)).print(table)


def _cells(row: Row) -> tuple[str, ...]:
    def shown(mean: Mean | None, sign: str = "") -> str:
        return "" if mean is None else f"{mean.mean:{sign}.3f} [{mean.low:.2f}, {mean.high:.2f}]"

    evicted = "" if row.evicted_share is None else f"{row.evicted_share:.1%}"
    numbers = (shown(row.score), shown(row.baseline), shown(row.difference, "+"), shown(row.ratio))
    return (row.task, row.tokens, str(row.score.items), evicted, *numbers)
