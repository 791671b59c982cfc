"""The command line of `kvir calibrate` and `kvir plot`.  Light: nothing but argparse."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def numbers(text: str) -> tuple[int, ...]:
    """`64,128,1k` as token counts."""
    return tuple(int(part[:-1]) * 1024 if part[-1:] in "kK" else int(part) for part in text.split(","))


def fractions(text: str) -> tuple[float, ...]:
    """`.98,.99`; each above 0 and at most 1."""
    found = tuple(float(part) for part in text.split(","))
    if not all(0 < value <= 1 for value in found):
        raise ValueError(text)
    return found


def share(text: str) -> float:
    (value,) = fractions(text)
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def add_calibrate(commands: Any) -> None:
    """`kvir calibrate`: `seqcalib` here, `polykv` and `hardkv` in folders of their own."""
    from kvir.calibration.hardkv.options import add_hardkv
    from kvir.calibration.polykv.options import add_polykv

    top = commands.add_parser("calibrate", help="choose what each KV head keeps, from a model and text")
    methods = top.add_subparsers(required=True, metavar="METHOD", dest="method")
    add_polykv(methods)
    add_hardkv(methods)
    p: argparse.ArgumentParser = methods.add_parser(
        "seqcalib",
        help="a window per KV head (HeadWiseKV, arXiv:2609.02029)",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    given = p.add_argument_group("input")
    given.add_argument("--model", metavar="DIR", required=True, help="folder of a Hugging Face model")
    given.add_argument("--text", metavar="FILE", required=True, help="UTF-8 text to calibrate on")
    given.add_argument("--context", type=numbers, metavar="N", default="2048", help="tokens of a sample")
    given.add_argument("--samples", type=count, metavar="K", default=2, help="pieces of the text")
    given.add_argument(
        "--retrieval", type=count, metavar="K", default=0, help="samples with hidden facts to find again"
    )
    given.add_argument(
        "--retrieval-weight",
        type=float,
        metavar="W",
        default=1.0,
        help="against text, for --objective residual",
    )
    given.add_argument(
        "--query-stride", type=count, metavar="N", default=8, help="compare every N-th query position"
    )
    given.add_argument(
        "--query-share", type=share, metavar="X", default=0.25, help="of the last X of a sample"
    )
    given.add_argument("--seed", type=int, default=0, help="of the hidden facts")

    choice = p.add_argument_group("choice")
    choice.add_argument(
        "--candidates", type=numbers, metavar="N,N,...", default="64,128,256,512,1024", help="window sizes"
    )
    choice.add_argument(
        "--sinks", type=numbers, metavar="N,N,...", default="4", help="first rows kept; 0 is the paper"
    )
    choice.add_argument(
        "--tau",
        type=fractions,
        metavar="X,X,...",
        default=".98,.99,.995",
        help="cosine thresholds of the grid",
    )
    choice.add_argument("--budget", type=share, metavar="X", help="largest share of the rows to keep")
    choice.add_argument(
        "--budget-context",
        type=count,
        metavar="N",
        help="of a context of N tokens: the shortest that the budget must hold for; default: --context",
    )
    choice.add_argument(
        "--objective",
        choices=("cosine", "residual", "gates"),
        default="cosine",
        help="cosine: the best threshold within the budget (the paper); residual: share the budget out over "
        "heads by error over the norm of the residual stream; gates: fit for all heads together which ones "
        "need the full history, windows by residual",
    )
    choice.add_argument(
        "--gate-window",
        type=count,
        metavar="N",
        default=256,
        help="for --objective gates: the candidate that a head without the full history has meanwhile",
    )
    choice.add_argument(
        "--window-weight",
        type=float,
        metavar="W",
        help="for --objective gates: of retrieval samples where windows are chosen; default: "
        "--retrieval-weight",
    )
    choice.add_argument(
        "--gate-steps", type=count, metavar="N", default=32, help="steps of the fit, a sample each"
    )

    choice.add_argument(
        "--phase",
        choices=("both", "decode"),
        default="both",
        help="decode: a prompt is read with full histories, and rows are dropped after it",
    )

    add_validation(p, samples=2)
    add_output(p)
    add_execution(p)


def add_validation(p: argparse.ArgumentParser, *, samples: int) -> None:
    """Options of the held-out text."""
    check = p.add_argument_group("validation")
    check.add_argument(
        "--held-out", metavar="FILE", help="other text for the loss; default: what follows in FILE"
    )
    check.add_argument(
        "--held-out-samples", type=count, metavar="K", default=samples, help="0: no validation"
    )


def add_output(p: argparse.ArgumentParser) -> None:
    """Options of the files that are written."""
    out = p.add_argument_group("output")
    out.add_argument("-o", "--output", metavar="PLAN.ir", required=True)
    out.add_argument("--name", help="of the policy; default: from the file's name")
    out.add_argument("--grid", metavar="JSON", help="the whole grid; default: PLAN.json beside the plan")
    out.add_argument("--picture", metavar="PNG", help="default: PLAN.png beside the plan")


def add_execution(p: argparse.ArgumentParser) -> None:
    """Options of how the model runs."""
    run = p.add_argument_group("execution")
    run.add_argument("--device", default="cpu", help="of PyTorch, e.g. cuda")
    run.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="weights are read as"
    )
    run.add_argument("--threads", type=count, metavar="N", default=0, help="0: PyTorch's choice")


def add_plot(commands: Any) -> None:
    """`kvir plot`."""
    p = commands.add_parser("plot", help="draw the grid of a calibration")
    p.add_argument("grid", metavar="JSON", help="written by `kvir calibrate`")
    p.add_argument("-o", "--output", metavar="PNG", help="default: the grid's name with another ending")


_REPORTED = (
    *("model", "text", "context", "samples", "retrieval", "retrieval_weight", "query_stride", "query_share"),
    *(
        "seed",
        "candidates",
        "sinks",
        "tau",
        "budget",
        "budget_context",
        "objective",
        "gate_window",
        "gate_steps",
        "window_weight",
        "phase",
        "held_out",
        "held_out_samples",
        "name",
    ),
    *("dtype", "grid", "picture", "output"),
)
_DEFAULTS: dict[str, object] = {
    **{"retrieval": 0, "retrieval_weight": 1.0, "query_stride": 8, "query_share": 0.25, "seed": 0},
    **{"held_out_samples": 2, "dtype": "float32", "objective": "cosine", "phase": "both"},
    **{"gate_window": 256, "gate_steps": 32},
}


def command_text(
    args: argparse.Namespace,
    reported: Sequence[str] = _REPORTED,
    defaults: Mapping[str, object] = _DEFAULTS,
) -> str:
    """The command that does the same again; what is at its default is left out."""
    words = ["kvir", "calibrate", args.method]
    for name in reported:
        value = getattr(args, name)
        if value is None or defaults.get(name) == value:
            continue
        flag = "-o" if name == "output" else "--" + name.replace("_", "-")
        text = (
            ",".join(f"{v:g}" if isinstance(v, float) else str(v) for v in value)
            if isinstance(value, tuple)
            else None
        )
        if text is None:
            text = f"{value:g}" if isinstance(value, float) else str(value)
        words += [
            flag,
            shell_path(text)
            if name in ("model", "text", "held_out", "grid", "picture", "output")
            else shlex.quote(text),
        ]
    return " ".join(words)


def shell_path(text: str) -> str:
    """A path as a shell reads it, the home folder as `~`."""
    home = str(Path.home()) + "/"
    return "~/" + shlex.quote(text[len(home) :]) if text.startswith(home) else shlex.quote(text)
