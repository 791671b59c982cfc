"""What every calibration does around its method: read texts, load the model, name and write the files."""

from __future__ import annotations

import argparse
import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from kvir.calibration.harness import Harness
from kvir.calibration.run import Text
from kvir.lowering.plan_file import write_atomically


@dataclass(frozen=True)
class Job:
    harness: Harness
    text: Text
    held_out: Text | None
    name: str  # of the policy
    output: Path
    grid: Path
    picture: Path

    @property
    def unfinished(self) -> Path:
        """Where layers that are done wait for the others."""
        return self.output.with_name(f".{self.output.name}.unfinished")

    def finish(self, plan: str) -> None:
        """Write the plan, last of all files."""
        write_atomically(self.output, plan.encode())
        self.unfinished.unlink(missing_ok=True)

    def say_files(self) -> None:
        print(f"wrote {self.output}, {self.grid}, {self.picture}", file=sys.stderr)


def open_job(args: argparse.Namespace) -> Job:
    """Raises CalibrationError and OSError as `Harness` and the texts do."""
    output = Path(args.output)
    texts = [_named(path) if path else None for path in (args.text, args.held_out)]
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    quiet()
    text, held_out = texts
    assert text is not None
    return Job(
        harness=Harness(Path(args.model), device=args.device, dtype=getattr(torch, args.dtype)),
        text=text,
        held_out=held_out,
        name=args.name or output.stem.replace("_", "-"),
        output=output,
        grid=Path(args.grid) if args.grid else output.with_suffix(".json"),
        picture=Path(args.picture) if args.picture else output.with_suffix(".png"),
    )


def quiet() -> None:
    """No bars and warnings of transformers between ours."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _named(path: str) -> Text:
    text = Path(path).read_text(encoding="utf-8")
    return f"{Path(path).name}, sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}", text
