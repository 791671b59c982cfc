"""The `kvir` command.  One function per subcommand; each imports what it needs, so that all start fast.

Exit codes: 0 done, 2 bad input (everything that is wrong is on standard error), 1 kvir's own failure.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvir.cli_parser import parser

if TYPE_CHECKING:
    from kvir.lowering.spec import AnyStage
    from kvir.lowering.stages import LayoutPlan, ModelFacts
    from kvir.policy_ir.diagnostic import Report

BAD_INPUT = 2
INTERRUPTED = 130  # as shells report SIGINT


class Usage(Exception):
    """Bad input that is no diagnostic: its text is one line for standard error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from kvir.policy_ir.diagnostic import PolicyError

    args = parser().parse_args(argv)
    try:
        return COMMANDS[args.command](args)
    except PolicyError as error:
        _print_report(error.report)
    except Usage as error:
        print(f"kvir: {error}", file=sys.stderr)
    except ModuleNotFoundError as error:
        if (error.name or "kvir").partition(".")[0] == "kvir":
            raise
        print(f"kvir: {args.command} needs `{error.name}`: pip install 'kvir[calibrate]'", file=sys.stderr)
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

    from kvir.lowering.device_facts import DEVICES
    from kvir.lowering.show import show as show_layout
    from kvir.lowering.units import parse_bytes, parse_tokens

    device = DEVICES.get(args.device) if args.device else None
    if args.device and device is None:
        raise Usage(f"unknown device `{args.device}`; known: {', '.join(DEVICES)}")
    try:
        memory_bytes = parse_bytes(args.memory) if args.memory else device and device.memory_bytes
        lengths = [parse_tokens(part) for part in args.lengths.split(",")] if args.lengths else []
        show_layout(
            _layout(args),
            Console(),
            memory_bytes=memory_bytes,
            lengths=lengths,
            rank_count=args.tp,
            device=device,
        )
    except ValueError as error:
        raise Usage(str(error)) from None
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


def format_files(args: argparse.Namespace) -> int:
    """Bring policies into canonical layout, comments kept; with `--check`, only say which would change."""
    from kvir.lowering.plan_file import write_atomically
    from kvir.policy_ir import PolicyError, read_file
    from kvir.policy_ir.format import format_text

    changed = False
    for name in args.files:
        policy, report, source = read_file(name)
        if policy is None:
            raise PolicyError(report)
        text = format_text(source.text, name)
        if text != source.text:
            changed = True
            print(f"{name}: {'would change' if args.check else 'formatted'}")
            if not args.check:
                write_atomically(name, text.encode())
    return BAD_INPUT if changed and args.check else 0


def schema(args: argparse.Namespace) -> int:
    """The JSON Schema of policy files, for editors."""
    from kvir.policy_ir.schema import schema_text

    print(schema_text(), end="")
    return 0


def calibrate(args: argparse.Namespace) -> int:
    """Choose what each KV head keeps, from a model and text; write the plan, the grid and a picture."""
    from kvir.calibration import command

    return _calibration(command.calibrate, args)


def plot(args: argparse.Namespace) -> int:
    """Draw the grid of a calibration."""
    from kvir.calibration import command

    return _calibration(command.plot, args)


def evaluate(args: argparse.Namespace) -> int:
    """Score a server or a plan on long-context tasks."""
    from kvir.evals import command
    from kvir.evals.answers import EvalError

    try:
        command.evaluate(args)
    except EvalError as error:
        raise Usage(str(error)) from None
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "check": check,
    "lower": lower,
    "show": show,
    "explain": explain,
    "print": print_file,
    "fmt": format_files,
    "schema": schema,
    "calibrate": calibrate,
    "plot": plot,
    "eval": evaluate,
}


# ---- parts -------------------------------------------------------------------------------------------------


def _calibration(run: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> int:
    from kvir.calibration.harness import CalibrationError

    try:
        run(args)
    except CalibrationError as error:
        raise Usage(str(error)) from None
    except KeyboardInterrupt:
        print("kvir: interrupted; the same command goes on from the last finished layer", file=sys.stderr)
        return INTERRUPTED
    return 0


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
