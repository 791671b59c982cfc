"""`kvir calibrate polykv`: from options to files."""

from __future__ import annotations

import argparse

from kvir.calibration.harness import CalibrationError
from kvir.calibration.polykv.options import polykv_command
from kvir.calibration.polykv.result import PolyCalibration, write


def calibrate_polykv(args: argparse.Namespace) -> None:
    """Run a calibration; write plan, grid and picture.

    Raises:
        CalibrationError: model, text and options do not fit together.
        PolicyError: the model's config cannot be planned for.
        OSError: a file cannot be read or written.
    """
    from kvir.calibration.job import open_job
    from kvir.calibration.polykv.plot import draw
    from kvir.calibration.polykv.policy import policy_text
    from kvir.calibration.polykv.report import print_summary
    from kvir.calibration.polykv.run import Request, calibrate
    from kvir.calibration.report import Bar
    from kvir.lowering.pipeline import lower_to
    from kvir.policy_ir import parse

    (context,) = args.context if len(args.context) == 1 else (0,)
    if context < 16 or args.continuation < 2 or args.samples < 1 or args.query_stride < 1:
        raise CalibrationError(
            "--context takes one number of at least 16, --continuation at least 2, --samples and "
            "--query-stride at least 1"
        )
    if args.retrieval_weight < 0:
        raise CalibrationError("--retrieval-weight is at least 0")
    job = open_job(args)
    request = Request(
        grain=args.grain,
        budget=args.budget,
        context_tokens=context,
        continuation_tokens=args.continuation,
        samples=args.samples,
        retrieval_samples=args.retrieval,
        retrieval_weight=args.retrieval_weight,
        query_stride=args.query_stride,
        methods=tuple(name.strip() for name in args.methods.split(",") if name.strip()),
        sink_tokens=args.sinks,
        recent_tokens=args.recent,
        shares=args.budgets,
        minimum_rows=args.minimum,
        held_out_samples=args.held_out_samples,
        seed=args.seed,
        dtype=args.dtype,
    )
    with Bar() as bar:
        found, plan = calibrate(job.harness, request, job.text, job.held_out, job.name, job.unfinished, bar)
    words = policy_text(plan, headline(found, polykv_command(args)))
    facts = job.harness.facts
    lower_to("layout", parse(words), facts, dtype=facts.dtype)  # what is written is a plan
    write(job.grid, found)
    draw(found, job.picture)
    job.finish(words)
    print_summary(found)
    job.say_files()


def headline(found: PolyCalibration, command: str) -> list[str]:
    """The comment on top of the plan."""
    unit = "KV head" if found.inputs.grain == "head" else "layer"
    lines = [f"A method and a budget per {unit}, calibrated after PolyKV (arXiv:2606.15157).", command]
    kept = f"keeps {found.inputs.budget:.1%} of the rows of a {found.inputs.context_tokens}-token prompt"
    if found.plan is not None and found.full is not None and found.best_single is not None:
        best = found.best_single
        kept += f"; held-out loss {found.plan.loss:.3f}, full KV {found.full.loss:.3f}, "
        kept += f"{best.name} alone {best.loss:.3f}"
    return [*lines, kept]
