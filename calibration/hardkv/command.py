"""`kvir calibrate hardkv`: from a calibrated plan to limits of Hard-KV."""

from __future__ import annotations

import argparse
import sys

from kvir import __version__
from kvir.calibration.hardkv.budgets import LEAST_ROWS, hardkv_rules, head_budgets, head_shares
from kvir.calibration.harness import CalibrationError
from kvir.calibration.options import shell_path
from kvir.calibration.polykv.policy import policy_text
from kvir.lowering.load import plan_for_server
from kvir.lowering.pipeline import lower_to
from kvir.lowering.plan_file import write_atomically
from kvir.policy_ir import Policy, parse
from kvir.policy_ir.nodes import ModelPin, Provenance

TOOL = "kvir calibrate hardkv"
CONTEXT_TOKENS = 1024  # of a prompt, where the plan does not say what it was calibrated for


def calibrate_hardkv(args: argparse.Namespace) -> None:
    """Write a policy.

    Raises:
        CalibrationError: the options do not fit together.
        PolicyError: plan and model do not fit together.
        OSError: a file cannot be read or written.
    """
    least = args.recent + LEAST_ROWS
    if args.rows < least or args.answer < args.rows or args.every < 1 or args.recent < 1:
        raise CalibrationError(
            f"--rows is at least {least} (recent rows and {LEAST_ROWS}) and at most --answer; --every and "
            "--recent are at least 1"
        )
    plan = plan_for_server(args.plan, args.model, dtype="float32")
    source = plan.policy.provenance
    context = CONTEXT_TOKENS if source is None or source.context is None else source.context
    shares = head_shares(plan.budgeted, context)
    budgets = head_budgets(shares, args.rows, args.answer, args.recent)
    rules = hardkv_rules(
        budgets,
        [layer.layer_id for layer in plan.model.layers],
        mass=None if args.fixed else args.mass,
        every=args.every,
        recent=args.recent,
        sink=args.sinks,
    )
    policy = Policy(
        kvir=1,
        name=args.name or args.output.stem.replace("_", "-"),
        model=ModelPin(arch=plan.model.arch, layers=plan.model.layer_count),
        rules=rules,
        provenance=Provenance(
            tool=TOOL,
            version=__version__,
            model=plan.model.fingerprint,
            data=f"{plan.policy.name}; {args.rows} rows of {args.answer} per head",
            context=context,
        ),
    )
    whole = sum(rows is None for rows in budgets.values())
    form = "rows" if args.fixed else "a floor and a cap"
    header = [
        f"Hard-KV with {form} per KV head, in proportion to a calibrated plan.",
        _command(args),
        f"{args.rows} rows of an answer of {args.answer} tokens per head on average; {whole} heads keep all",
    ]
    words = policy_text(policy, header)
    lower_to("layout", parse(words), plan.model, dtype=plan.model.dtype)  # what is written is a plan
    write_atomically(args.output, words.encode())
    print(f"wrote {args.output}: {header[-1]}", file=sys.stderr)


def _command(args: argparse.Namespace) -> str:
    """The command that does the same again."""
    words = ["kvir calibrate hardkv", shell_path(str(args.plan)), "--model", shell_path(str(args.model))]
    words += ["--fixed"] if args.fixed else ["--mass", f"{args.mass:g}"]
    for name in ("rows", "answer", "every", "recent", "sinks"):
        words += [f"--{name}", str(getattr(args, name))]
    return " ".join([*words, "-o", shell_path(str(args.output))])
