"""The command line of `kvir calibrate polykv`.  Light: nothing but argparse."""

from __future__ import annotations

import argparse
from typing import Any

from kvir.calibration.options import (
    add_execution,
    add_output,
    add_validation,
    command_text,
    count,
    fractions,
    numbers,
    share,
)


def add_polykv(methods: Any) -> None:
    """`kvir calibrate polykv`."""
    p: argparse.ArgumentParser = methods.add_parser(
        "polykv",
        help="a method and a budget per KV head or layer (PolyKV, arXiv:2606.15157)",
        description="Choose for each KV head (or layer) the method that changes its output least, and share "
        "out a budget by how much each needs. Rows are chosen at the end of a prompt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add(p)


def _add(p: argparse.ArgumentParser) -> None:
    given = p.add_argument_group("input")
    given.add_argument("--model", metavar="DIR", required=True, help="folder of a Hugging Face model")
    given.add_argument("--text", metavar="FILE", required=True, help="UTF-8 text to calibrate on")
    given.add_argument("--context", type=numbers, metavar="N", default="1024", help="tokens of a prompt")
    given.add_argument(
        "--continuation",
        type=count,
        metavar="N",
        default=128,
        help="tokens after it, where outputs are compared",
    )
    given.add_argument("--samples", type=count, metavar="K", default=12, help="pieces of the text")
    given.add_argument(
        "--retrieval",
        type=count,
        metavar="K",
        default=8,
        help="samples with hidden facts to find again, asked in the prompt and after it; 0 is the paper",
    )
    given.add_argument(
        "--retrieval-weight", type=float, metavar="W", default=1.0, help="of their errors against text"
    )
    given.add_argument(
        "--query-stride",
        type=count,
        metavar="N",
        default=4,
        help="compare every N-th token of a continuation",
    )
    given.add_argument("--seed", type=int, default=0, help="of the hidden facts")

    choice = p.add_argument_group("choice")
    choice.add_argument(
        "--grain",
        choices=("head", "layer"),
        default="head",
        help="what gets a method and a budget of its own; layer is the paper",
    )
    choice.add_argument("--budget", type=share, metavar="X", default=0.25, help="share of the rows to keep")
    choice.add_argument(
        "--methods",
        metavar="NAME,...",
        default="streaming,snapkv,h2o,tova,keydiff,expected_attention,lagkv,laprox",
        help="candidates; also scissorhands, knorm, adakv, criticalkv, vatp, cur, leverage, rkv, random, and "
        "files ending in .ir whose first rule is a method",
    )
    choice.add_argument("--sinks", type=count, metavar="N", default=4, help="first rows kept by every method")
    choice.add_argument(
        "--recent", type=count, metavar="N", default=32, help="last rows kept by every method"
    )
    choice.add_argument(
        "--budgets",
        type=fractions,
        metavar="X,X,...",
        default=".0625,.1,.15,.2,.35,.5,.75",
        help="shares at which errors are measured, beside --budget, the minimum and all",
    )
    choice.add_argument(
        "--minimum", type=count, metavar="N", help="least rows of a head; default: sinks and recent rows"
    )
    add_validation(p, samples=4)
    add_output(p)
    add_execution(p)


_REPORTED = (
    *("model", "text", "context", "continuation", "samples", "retrieval", "retrieval_weight"),
    *(
        "query_stride",
        "seed",
        "grain",
        "budget",
        "methods",
        "sinks",
        "recent",
        "budgets",
        "minimum",
    ),
    *("held_out", "held_out_samples", "name", "dtype", "grid", "picture", "output"),
)


def polykv_command(args: argparse.Namespace) -> str:
    """The command that does the same again; what is at its default is left out."""
    bare = argparse.ArgumentParser()
    _add(bare)
    defaults = vars(bare.parse_args(["--model", "", "--text", "", "--output", ""]))
    return command_text(args, _REPORTED, {name: value for name, value in defaults.items() if value != ""})
