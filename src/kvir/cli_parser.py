"""What the command line looks like."""

from __future__ import annotations

import argparse

from kvir import __version__
from kvir.calibration import options as calibration_options
from kvir.evals import options as eval_options

DTYPES = ("float32", "bfloat16", "float16")
TARGETS = ("sm_80", "sm_90", "sm_100")  # as in kernels.triton.build
PASSES = ("verify", "resolve", "budget", "layout", "kernels", "buckets", "plan")  # as in lowering.pipeline


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `command` names the function in `cli.COMMANDS`."""
    top = argparse.ArgumentParser(prog="kvir", description="Compile and inspect KV-cache policies.")
    top.add_argument("--version", action="version", version=f"kvir {__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND", dest="command")

    p = commands.add_parser("check", help="say everything that is wrong with policies")
    p.add_argument("files", nargs="+", metavar="FILE")
    p.add_argument("--model", metavar="DIR", help="check against this model too")
    p.add_argument("--dtype", choices=DTYPES)
    p.add_argument("--device", help="check that kernels exist for this device, e.g. cpu")
    p.add_argument("--json", action="store_true", help="findings as a JSON list on standard output")

    p = commands.add_parser("lower", help="lower a policy for a model into a plan")
    p.add_argument("file", metavar="FILE", help="a policy, or a stage that `--to STAGE -o FILE` wrote")
    p.add_argument("--model", metavar="DIR", help="needed for a policy")
    p.add_argument("--dtype", choices=DTYPES, help="of the KV cache; default: the model's")
    p.add_argument("--device", help="default: cpu")
    p.add_argument("--page-tokens", type=int, metavar="N", help="default: 16")
    p.add_argument("-o", "--output", metavar="FILE", help="as JSON; default, and `-`: standard output")
    p.add_argument("--print-after", action="append", choices=PASSES, help="print that stage; may repeat")
    p.add_argument(
        "--from", dest="start", choices=("text", *PASSES), help="what FILE must hold; default: any"
    )
    p.add_argument("--to", choices=PASSES, default="plan", help="stop after that pass")
    p.add_argument("--json", action="store_true", help="print stages as JSON, to be read back")

    p = commands.add_parser("show", help="what a policy keeps, costs, and lets fit")
    p.add_argument("file", metavar="FILE", help="a policy, a plan, or any stage before it")
    p.add_argument("--model", metavar="DIR", help="needed for a policy")
    p.add_argument("--dtype", choices=DTYPES)
    p.add_argument("--page-tokens", type=int, metavar="N", help="default: 16")
    p.add_argument("--memory", metavar="SIZE", help="of the KV cache, e.g. 2GiB: show what fits")
    p.add_argument("--lengths", metavar="N,N,...", help="sequence lengths, e.g. 1k,32k")
    p.add_argument("--tp", type=int, default=1, metavar="N", help="ranks of tensor parallelism")
    p.add_argument("--device", metavar="NAME", help="e.g. h200: its memory, and the time to read the cache")
    p.add_argument("--expanded", action="store_true", help="first the policy with presets written out")

    p = commands.add_parser("build-kernels", help="compile the GPU kernels of a plan ahead of time")
    p.add_argument("file", metavar="FILE", help="a policy, a plan, or any stage before it")
    p.add_argument("--model", metavar="DIR", help="needed for a policy")
    p.add_argument("--target", choices=TARGETS, required=True, help="the GPU; none has to be here")
    p.add_argument("--dtype", choices=DTYPES, help="of the KV cache; default: the model's")
    p.add_argument("--page-tokens", type=int, metavar="N", help="default: 16")
    p.add_argument("--no-flashinfer", action="store_true", help="Triton's kernels alone, in a minute")
    p.add_argument("-o", "--output", metavar="DIR", help="default: FILE with the ending .TARGET")

    p = commands.add_parser("explain", help="what a diagnostic code means")
    p.add_argument("code", metavar="CODE", help="e.g. KV203")

    p = commands.add_parser("print", help="a policy in canonical form")
    p.add_argument("file", metavar="FILE")

    p = commands.add_parser("fmt", help="bring policies into canonical layout, comments kept")
    p.add_argument("files", nargs="+", metavar="FILE")
    p.add_argument("--check", action="store_true", help="change nothing; exit code 2 if a file would change")

    commands.add_parser("schema", help="the JSON Schema of policy files, for editors")

    calibration_options.add_calibrate(commands)
    calibration_options.add_plot(commands)
    eval_options.add_eval(commands)
    eval_options.add_trace(commands)
    return top
