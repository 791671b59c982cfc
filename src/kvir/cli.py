"""The `kvir` command.  One function per subcommand; each imports what it needs, so that all start fast.

Exit codes: 0 done, 2 bad input (everything that is wrong is on standard error), 1 kvir's own failure.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvir import __version__

if TYPE_CHECKING:
    from kvir.lowering.spec import AnyStage
    from kvir.lowering.stages import LayoutPlan, ModelFacts
    from kvir.policy_ir.diagnostic import Report

BAD_INPUT = 2
DTYPES = ("float32", "bfloat16", "float16")
PASSES = ("verify", "resolve", "budget", "layout", "kernels", "buckets", "plan")


class Usage(Exception):
    """Bad input that is no diagnostic: its text is one line for standard error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from kvir.policy_ir.diagnostic import PolicyError

    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except PolicyError as error:
        _print_report(error.report)
    except Usage as error:
        print(f"kvir: {error}", file=sys.stderr)
    except BrokenPipeError:
        sys.stderr.close()
    except OSError as error:
        print(f"kvir: {error.filename}: {error.strerror}", file=sys.stderr)
    return BAD_INPUT


# ---- commands ----------------------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> int:
    """Say everything that is wrong with policies, or that they are fine."""
    from kvir.policy_ir import read_file, render

    model = _model(args.model) if args.model else None
    records: list[object] = []
    failed = False
    for name in args.files:
        policy, report, _ = read_file(name)
        if policy is not None:
            _check_lowering(policy, model, args, report)
        failed |= report.error_count > 0
        if args.json:
            import msgspec

            records += msgspec.json.decode(render.as_json(report))
        elif len(report):
            _print_report(report)
        if not args.json and not report.error_count:
            on = f" on {model.arch}, {len(model.layers)} layers" if model is not None else ""
            print(f"{name}: ok{on}")
    if args.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(records), indent=2).decode())
    return BAD_INPUT if failed else 0


def lower(args: argparse.Namespace) -> int:
    """Lower a policy for a model; write the plan, or the stage that `--to` names."""
    from kvir.lowering.pipeline import lower_to
    from kvir.lowering.plan_file import encode_stage, write_atomically
    from kvir.lowering.stage_text import stage_text
    from kvir.policy_ir import PolicyError, read_file

    def observe(name: str, stage: AnyStage, seconds: float) -> None:
        if name in (args.print_after or ()):
            print(f"-- after {name} ({seconds * 1e3:.2f} ms)\n{stage_text(stage)}", file=sys.stderr)

    model = _model(args.model)
    policy, report, _ = read_file(args.file)
    if policy is None:
        raise PolicyError(report)
    stage = lower_to(
        args.to,
        policy,
        model,
        dtype=args.dtype or model.dtype,
        device=args.device,
        page_tokens=args.page_tokens,
        report=report,
        observe=observe,
    )
    if len(report):
        _print_report(report)
    if args.output is not None:
        write_atomically(args.output, encode_stage(stage))
    elif args.to == "plan":
        sys.stdout.write(encode_stage(stage).decode())
    else:
        sys.stdout.write(stage_text(stage))
    return 0


def show(args: argparse.Namespace) -> int:
    """What each layer keeps, what requests cost, and what fits in memory."""
    from rich.console import Console

    from kvir.lowering.show import show as show_layout
    from kvir.lowering.units import parse_bytes, parse_tokens

    try:
        memory_bytes = parse_bytes(args.memory) if args.memory else None
        lengths = [parse_tokens(part) for part in args.lengths.split(",")] if args.lengths else []
    except ValueError as error:
        raise Usage(str(error)) from None
    show_layout(_layout(args), Console(), memory_bytes=memory_bytes, lengths=lengths)
    return 0


def explain(args: argparse.Namespace) -> int:
    """The page of a diagnostic code."""
    from kvir.policy_ir.codes import explain as page

    try:
        print(page(args.code), end="")
    except KeyError as error:
        raise Usage(error.args[0]) from None
    return 0


def print_file(args: argparse.Namespace) -> int:
    """A policy in canonical form."""
    from kvir.policy_ir import load, print_policy

    print(print_policy(load(args.file)), end="")
    return 0


# ---- parts -------------------------------------------------------------------------------------------------


def _check_lowering(
    policy: object, model: ModelFacts | None, args: argparse.Namespace, report: Report
) -> None:
    """Add to `report` what the passes find: those that need no model, or all that `args` gives input for."""
    from kvir.lowering.pipeline import lower_to
    from kvir.lowering.verify import Verify
    from kvir.policy_ir import Policy, PolicyError

    assert isinstance(policy, Policy)
    if model is None:
        Verify(report)(policy)
        return
    with contextlib.suppress(PolicyError):  # all of it is in `report`
        lower_to(
            "kernels" if args.device else "layout",
            policy,
            model,
            dtype=args.dtype or model.dtype,
            device=args.device or "",
            report=report,
        )


def _layout(args: argparse.Namespace) -> LayoutPlan:
    """The layout of a plan file, or of a policy on `--model`."""
    from kvir.lowering import plan_file
    from kvir.lowering.pipeline import lower_to
    from kvir.lowering.stages import LayoutPlan
    from kvir.policy_ir import PolicyError, Report, Source, read_file

    data = Path(args.file).read_bytes()
    if plan_file.is_plan(data):
        model = _model(args.model) if args.model else None
        report = Report(Source(args.file, ""))
        return plan_file.decode(data, report, model=model, dtype=args.dtype).layout
    if not args.model:
        raise Usage(f"{args.file} is a policy: give the model's folder with --model")
    model = _model(args.model)
    policy, report, _ = read_file(args.file)
    if policy is None:
        raise PolicyError(report)
    stage = lower_to(
        "layout",
        policy,
        model,
        dtype=args.dtype or model.dtype,
        page_tokens=args.page_tokens,
        report=report,
    )
    if len(report):
        _print_report(report)
    assert isinstance(stage, LayoutPlan)
    return stage


def _model(folder: str) -> ModelFacts:
    from kvir.lowering.model_facts import load_model

    return load_model(folder)


def _print_report(report: Report) -> None:
    import os

    from kvir.policy_ir import render

    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print(render.full(report, color=color), end="", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvir", description="Compile and inspect KV-cache policies.")
    parser.add_argument("--version", action="version", version=f"kvir {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    p = commands.add_parser("check", help="say everything that is wrong with policies")
    p.add_argument("files", nargs="+", metavar="FILE")
    p.add_argument("--model", metavar="DIR", help="check against this model too")
    p.add_argument("--dtype", choices=DTYPES)
    p.add_argument("--device", help="check that kernels exist for this device, e.g. cpu")
    p.add_argument("--json", action="store_true", help="findings as a JSON list on standard output")
    p.set_defaults(run=check)

    p = commands.add_parser("lower", help="lower a policy for a model into a plan")
    p.add_argument("file", metavar="FILE")
    p.add_argument("--model", metavar="DIR", required=True)
    p.add_argument("--dtype", choices=DTYPES, help="of the KV cache; default: the model's")
    p.add_argument("--device", default="cpu")
    p.add_argument("--page-tokens", type=int, default=16, metavar="N")
    p.add_argument("-o", "--output", metavar="PLAN", help="default: standard output")
    p.add_argument("--print-after", action="append", choices=PASSES, help="print that stage; may repeat")
    p.add_argument("--to", choices=PASSES, default="plan", help="stop after that pass")
    p.set_defaults(run=lower)

    p = commands.add_parser("show", help="what a policy keeps, costs, and lets fit")
    p.add_argument("file", metavar="FILE", help="a policy or a plan")
    p.add_argument("--model", metavar="DIR", help="needed for a policy")
    p.add_argument("--dtype", choices=DTYPES)
    p.add_argument("--page-tokens", type=int, default=16, metavar="N")
    p.add_argument("--memory", metavar="SIZE", help="of the KV cache, e.g. 2GiB: show what fits")
    p.add_argument("--lengths", metavar="N,N,...", help="sequence lengths, e.g. 1k,32k")
    p.set_defaults(run=show)

    p = commands.add_parser("explain", help="what a diagnostic code means")
    p.add_argument("code", metavar="CODE", help="e.g. KV203")
    p.set_defaults(run=explain)

    p = commands.add_parser("print", help="a policy in canonical form")
    p.add_argument("file", metavar="FILE")
    p.set_defaults(run=print_file)
    return parser
