"""The command line of `kvir eval`.  Light: nothing but argparse."""

from __future__ import annotations

import argparse
from typing import Any

from kvir.calibration.options import count, numbers


def names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def add_eval(commands: Any) -> None:
    """`kvir eval`."""
    p: argparse.ArgumentParser = commands.add_parser(
        "eval",
        help="score a server or a plan on long-context tasks",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    who = p.add_argument_group("who answers")
    who.add_argument("--url", help="of an OpenAI-compatible server")
    who.add_argument("--baseline-url", help="of a second server, compared item by item")
    who.add_argument("--api-key", help="for both")
    who.add_argument(
        "--model",
        metavar="DIR",
        help="answers itself where there is no --url; else gives tokenizer and row counts",
    )
    who.add_argument("--plan", metavar="FILE", help="policy of the model, or the one that --url serves")
    who.add_argument(
        "--baseline-plan", metavar="FILE", help="a second policy of the model; `full` for full KV"
    )
    what = p.add_argument_group("tasks")
    what.add_argument(
        "--tasks", type=names, metavar="NAME,...", default="all", help="tasks, or needles, or all"
    )
    what.add_argument(
        "--lengths", type=numbers, metavar="N,N,...", default="2048,4096", help="tokens of a prompt"
    )
    what.add_argument("--items", type=count, metavar="N", default=20, help="per task and length")
    what.add_argument("--seed", type=int, default=0)
    what.add_argument("--text", metavar="FILE", help="what the facts are hidden in, and `reading` asks about")
    what.add_argument(
        "--agnostic",
        action="store_true",
        help="the question comes in a second turn, after the context was read",
    )
    what.add_argument(
        "--prompts",
        choices=("auto", "chat", "plain"),
        default="auto",
        help="plain: a text to go on with; auto: plain if the tokenizer of --model has no chat template",
    )
    out = p.add_argument_group("output and execution")
    out.add_argument("-o", "--output", metavar="JSON", help="every item, answer and score")
    out.add_argument("--concurrency", type=count, metavar="N", default=4, help="requests at a time")
    out.add_argument("--device", default="cpu", help="of a local model")
    out.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of a local model")


def add_trace(commands: Any) -> None:
    """`kvir trace`."""
    p = commands.add_parser("trace", help="what each KV head of running requests holds over time")
    p.add_argument("file", nargs="?", metavar="FILE", help="a trace to draw again; else a server is watched")
    p.add_argument("--url", default="http://127.0.0.1:30000", help="of the server (%(default)s)")
    p.add_argument(
        "--every", type=float, default=0.2, metavar="S", help="seconds between looks (%(default)s)"
    )
    p.add_argument(
        "--seconds", type=float, metavar="S", help="how long; default: until requests came and went"
    )
    p.add_argument("-o", "--output", metavar="JSONL", help="where the trace goes")
    p.add_argument("--picture", metavar="PNG", help="rows of each KV head over time")
