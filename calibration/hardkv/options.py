"""The command line of `kvir calibrate hardkv`.  Light: nothing but argparse."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvir.calibration.options import count, share


def add_hardkv(methods: Any) -> None:
    """`kvir calibrate hardkv`."""
    p: argparse.ArgumentParser = methods.add_parser(
        "hardkv",
        help="a floor and a cap per KV head while decoding (Hard-KV, arXiv:2606.28831)",
        description="Give each KV head a floor and a cap for the nucleus of its attention while decoding, in "
        "proportion to what a plan of `kvir calibrate polykv` gives it of a prompt.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("plan", type=Path, metavar="PLAN.ir", help="a plan calibrated for this model")
    p.add_argument("--model", metavar="DIR", type=Path, required=True, help="folder of a Hugging Face model")
    p.add_argument(
        "--rows", type=count, metavar="N", required=True, help="of an answer, per head, on average"
    )
    p.add_argument("--answer", type=count, metavar="N", default=2000, help="tokens of an answer")
    form = p.add_mutually_exclusive_group()
    form.add_argument(
        "--mass", type=share, metavar="P", default=0.9, help="of attention that a nucleus holds"
    )
    form.add_argument("--fixed", action="store_true", help="a number of rows per head instead of limits")
    p.add_argument("--every", type=count, metavar="N", default=128, help="tokens between two selections")
    p.add_argument("--recent", type=count, metavar="N", default=32, help="last rows kept by every head")
    p.add_argument("--sinks", type=count, metavar="N", default=4, help="first rows kept by every head")
    p.add_argument("-o", "--output", type=Path, metavar="OUT.ir", required=True, help="the policy")
    p.add_argument("--name", help="of the policy; default: from the file's name")
