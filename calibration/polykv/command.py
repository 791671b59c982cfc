"""`kvir calibrate polykv`: from options to files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

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
    import torch

    from kvir.calibration.command import quiet, text_name
    from kvir.calibration.harness import Harness
    from kvir.calibration.polykv.plot import draw
    from kvir.calibration.polykv.policy import policy_text
    from kvir.calibration.polykv.report import print_summary
    from kvir.calibration.polykv.run import Request, calibrate
    from kvir.calibration.report import Bar
    from kvir.lowering.pipeline import lower_to
    from kvir.lowering.plan_file import write_atomically
    from kvir.policy_ir import parse

    (context,) = args.context if len(args.context) == 1 else (0,)
    if context < 16 or args.continuation < 2 or args.samples < 1 or args.query_stride < 1:
        raise CalibrationError(
            "--context takes one number of at least 16, --continuation at least 2, --samples and "
            "--query-stride at least 1"
        )
    if args.retrieval_weight < 0:
        raise CalibrationError("--retrieval-weight is at least 0")
    output = Path(args.output)
    text = Path(args.text).read_text(encoding="utf-8")
    held_out = Path(args.held_out).read_text(encoding="utf-8") if args.held_out else None
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    quiet()
    harness = Harness(Path(args.model), device=args.device, dtype=getattr(torch, args.dtype))
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
    unfinished = output.with_name(f".{output.name}.unfinished")
    with Bar() as bar:
        found, plan = calibrate(
            harness,
            request,
            (text_name(args.text, text), text),
            (text_name(args.held_out, held_out), held_out) if held_out is not None else None,
            args.name or output.stem.replace("_", "-"),
            unfinished,
            bar,
        )
    words = policy_text(plan, headline(found, polykv_command(args)))
    lower_to("layout", parse(words), harness.facts, dtype=harness.facts.dtype)  # what is written is a plan
    grid = Path(args.grid) if args.grid else output.with_suffix(".json")
    picture = Path(args.picture) if args.picture else output.with_suffix(".png")
    write(grid, found)
    draw(found, picture)
    write_atomically(output, words.encode())
    unfinished.unlink(missing_ok=True)
    print_summary(found)
    print(f"wrote {output}, {grid}, {picture}", file=sys.stderr)


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
