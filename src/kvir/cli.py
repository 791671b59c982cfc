"""The `kvir` command.  One function per subcommand; each imports what it needs, so that all start fast.

Exit codes: 0 done, 2 bad input (everything that is wrong is on standard error), 1 kvir's own failure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from kvir.cli_parser import parser
from kvir.cli_parts import Usage, columns, model_in, print_report

BAD_INPUT = 2
INTERRUPTED = 130  # as shells report SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    from kvir.policy_ir.diagnostic import PolicyError

    args = parser().parse_args(argv)
    try:
        return COMMANDS[args.command](args)
    except PolicyError as error:
        print_report(error.report)
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
    from kvir.cli_plan import check_lowering
    from kvir.policy_ir import read_file, render

    model = model_in(args.model) if args.model else None
    records: list[object] = []
    failed = False
    for name in args.files:
        policy, report, _ = read_file(name)
        if policy is not None:
            check_lowering(policy, model, args, report)
        failed |= report.error_count > 0
        if args.json:
            import msgspec

            records += msgspec.json.decode(render.as_json(report))
        elif len(report):
            print_report(report)
        if not args.json and not report.error_count:
            on = f" on {model.arch}, {len(model.layers)} layers" if model is not None else ""
            print(f"{name}: ok{on}")
    if args.json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(records), indent=2).decode())
    return BAD_INPUT if failed else 0


def lower(args: argparse.Namespace) -> int:
    """Lower a policy, or go on from any stage."""
    from kvir.cli_plan import lower as run

    return run(args)


def show(args: argparse.Namespace) -> int:
    """What each layer keeps, what requests cost, and what fits in memory."""
    from kvir.cli_plan import show as run

    return run(args)


def build_kernels(args: argparse.Namespace) -> int:
    """Compile the GPU kernels that a plan asks for; no GPU is needed."""
    from kvir.cli_build import build_kernels as run

    return run(args)


def explain(args: argparse.Namespace) -> int:
    """The page of a diagnostic code."""
    from kvir.policy_ir.codes import explain as page

    try:
        print(page(args.code, columns(sys.stdout)), end="")
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


def trace(args: argparse.Namespace) -> int:
    """Watch a server, or draw what was seen."""
    from kvir.evals.trace import TraceError, run

    try:
        run(args)
    except TraceError as error:
        raise Usage(str(error)) from None
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "check": check,
    "lower": lower,
    "show": show,
    "build-kernels": build_kernels,
    "explain": explain,
    "print": print_file,
    "fmt": format_files,
    "schema": schema,
    "calibrate": calibrate,
    "plot": plot,
    "eval": evaluate,
    "trace": trace,
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
