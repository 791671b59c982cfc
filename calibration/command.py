"""`kvir calibrate` and `kvir plot`: from options to files; `polykv` and `hardkv` have their own folders."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvir.calibration.harness import CalibrationError
from kvir.calibration.options import command_text
from kvir.calibration.result import read, write


def calibrate(args: argparse.Namespace) -> None:
    """Run the method that was named.  Raises what the methods raise."""
    match args.method:
        case "polykv":
            from kvir.calibration.polykv.command import calibrate_polykv

            calibrate_polykv(args)
        case "hardkv":
            from kvir.calibration.hardkv.command import calibrate_hardkv

            calibrate_hardkv(args)
        case _:
            calibrate_seqcalib(args)


def calibrate_seqcalib(args: argparse.Namespace) -> None:
    """Run a calibration; write plan, grid and picture.

    Raises:
        CalibrationError: model, text and options do not fit together.
        PolicyError: the model's config cannot be planned for.
        OSError: a file cannot be read or written.
    """
    from kvir.calibration import run
    from kvir.calibration.job import open_job
    from kvir.calibration.plot import draw
    from kvir.calibration.policy import policy_text
    from kvir.calibration.report import Bar, print_summary

    (context,) = args.context if len(args.context) == 1 else (0,)
    if context < 16 or args.samples < 1 or args.query_stride < 1:
        raise CalibrationError(
            "--context takes one number of at least 16, --samples and --query-stride at least 1"
        )
    if args.objective != "cosine" and args.budget is None:
        raise CalibrationError(f"--objective {args.objective} shares out a budget: give --budget, e.g. 0.45")
    if args.budget_context is not None and (args.budget is None or args.budget_context < 16):
        raise CalibrationError("--budget-context takes at least 16 tokens, and goes with --budget")
    job = open_job(args)
    request = run.Request(
        context_tokens=context,
        samples=args.samples,
        retrieval_samples=args.retrieval,
        retrieval_weight=args.retrieval_weight,
        query_stride=args.query_stride,
        query_share=args.query_share,
        recent_tokens=args.candidates,
        sink_tokens=args.sinks,
        taus=args.tau,
        budget=args.budget,
        budget_context_tokens=args.budget_context,
        objective=args.objective,
        gate_window_tokens=args.gate_window if args.objective == "gates" else None,
        gate_steps=args.gate_steps if args.objective == "gates" else None,
        window_weight=args.window_weight if args.objective == "gates" else None,
        phase=args.phase,
        held_out_samples=args.held_out_samples,
        seed=args.seed,
        dtype=args.dtype,
    )
    with Bar() as bar:
        found = run.calibrate(job.harness, request, job.text, job.held_out, job.unfinished, bar)
    plan = policy_text(job.harness.facts, found, job.name, headline(found, command_text(args)))
    write(job.grid, found)
    draw(found, job.picture)
    job.finish(plan)
    print_summary(found)
    job.say_files()


def plot(args: argparse.Namespace) -> None:
    """Draw a grid again.  Raises CalibrationError for a file that is none, OSError."""
    from kvir.calibration.plot import draw
    from kvir.calibration.polykv import plot as polykv_plot
    from kvir.calibration.polykv import result as polykv_result

    data = Path(args.grid).read_bytes()
    output = Path(args.output) if args.output else Path(args.grid).with_suffix(".png")
    try:
        if _kind(data) == "polykv":
            polykv_plot.draw(polykv_result.read(data), output)
        else:
            draw(read(data), output)
    except ValueError as error:
        raise CalibrationError(f"{args.grid}: not a grid that `kvir calibrate` wrote: {error}") from None


def _kind(data: bytes) -> object:
    """Which calibration wrote a grid.  Raises ValueError for what is no JSON."""
    found = json.loads(data)
    return found.get("kind") if isinstance(found, dict) else None


def headline(found: object, command: str) -> list[str]:
    """The comment on top of the plan."""
    from kvir.calibration.result import Calibration

    assert isinstance(found, Calibration)
    best = found.best
    lines = ["A window per KV head, calibrated by SeqCalib (HeadWiseKV, arXiv:2609.02029).", command]
    kept = f"keeps {best.kept_share:.1%} of the rows of a {found.inputs.counted_tokens}-token context"
    if best.loss is not None and found.loss_full is not None:
        kept += f"; held-out loss {best.loss:.3f}, full KV {found.loss_full:.3f}"
    return [*lines, kept]
