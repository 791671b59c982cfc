"""The commands that lower: `kvir lower`, `kvir show`, and what `kvir check` asks of a model."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvir.cli_parts import Usage, model_in, print_report

if TYPE_CHECKING:
    from kvir.lowering.spec import AnyStage
    from kvir.lowering.stages import LayoutPlan, ModelFacts
    from kvir.policy_ir import Policy, Report


def lower(args: argparse.Namespace) -> int:
    """From a policy, or any stage in a file, to a plan or the stage that `--to` names."""
    from kvir.lowering import stage_file
    from kvir.lowering.plan_file import write_atomically
    from kvir.lowering.stage_text import stage_text

    def text(stage: AnyStage) -> str:
        return stage_file.encode(stage).decode() if args.json else stage_text(stage)

    def observe(name: str, stage: AnyStage, seconds: float) -> None:
        if name in (args.print_after or ()):
            print(f"-- after {name} ({seconds * 1e3:.2f} ms)\n{text(stage)}", file=sys.stderr)

    start, report = _read(args.file, args.start)
    stage = _lower(args.to, start, report, args, observe)
    if len(report):
        print_report(report)
    if args.output not in (None, "-"):
        write_atomically(args.output, stage_file.encode(stage))
    elif args.to == "plan":
        sys.stdout.write(stage_file.encode(stage).decode())
    else:
        sys.stdout.write(text(stage))
    return 0


def show(args: argparse.Namespace) -> int:
    """What each layer keeps, what requests cost, and what fits in memory."""
    from rich.console import Console

    from kvir.lowering.device_facts import DEVICES
    from kvir.lowering.pipeline import policy_of
    from kvir.lowering.show import show as show_layout
    from kvir.lowering.units import parse_bytes, parse_tokens
    from kvir.policy_ir import Policy, print_policy

    device = DEVICES.get(args.device) if args.device else None
    if args.device and device is None:
        raise Usage(f"unknown device `{args.device}`; known: {', '.join(DEVICES)}")
    start, report = _read(args.file, None)
    if args.expanded:
        print(print_policy(policy_of(start)))
        if isinstance(start, Policy) and not args.model:
            return 0
    layout = _layout(start, report, args)
    if len(report):
        print_report(report)
    try:
        memory_bytes = parse_bytes(args.memory) if args.memory else device and device.memory_bytes
        lengths = [parse_tokens(part) for part in args.lengths.split(",")] if args.lengths else []
        show_layout(
            layout,
            Console(),
            memory_bytes=memory_bytes,
            lengths=lengths,
            rank_count=args.tp,
            device=device,
        )
    except ValueError as error:
        raise Usage(str(error)) from None
    return 0


def read_layout(args: argparse.Namespace) -> LayoutPlan:
    """The layout of `args.file`, a policy or any stage; findings go to standard error."""
    start, report = _read(args.file, None)
    layout = _layout(start, report, args)
    if len(report):
        print_report(report)
    return layout


def check_lowering(
    policy: Policy, model: ModelFacts | None, args: argparse.Namespace, report: Report
) -> None:
    """Add to `report` what the passes find: those that need no model, or all that `args` gives input for;
    and, as warnings, what a server of this version would refuse."""
    from kvir.lowering.pipeline import lower_to
    from kvir.lowering.stages import ExecutionPlan, LayoutPlan
    from kvir.lowering.unsupported import refuse, unsupported_by_runtime, unsupported_in_policy
    from kvir.lowering.verify import Verify
    from kvir.policy_ir import PolicyError

    if model is None:
        Verify(report)(policy)
        return
    with contextlib.suppress(PolicyError):  # all of it is in `report`
        stage = lower_to(
            "plan" if args.device else "layout",
            policy,
            model,
            dtype=args.dtype or model.dtype,
            device=args.device or "",
            report=report,
        )
        match stage:
            case ExecutionPlan():
                refuse(unsupported_by_runtime(stage), report, "warning")
            case LayoutPlan():
                refuse(unsupported_in_policy(stage.budgeted), report, "warning")
            case _:
                raise AssertionError(type(stage))


# ---- parts -------------------------------------------------------------------------------------------------


def _read(name: str, wanted: str | None) -> tuple[Policy | AnyStage, Report]:
    """The policy or stage in a file, and the report that belongs to its text.  `wanted` is what `--from`
    says."""
    from kvir.lowering import stage_file
    from kvir.lowering.plan_file import MAX_PLAN_BYTES
    from kvir.policy_ir import PolicyError, Report, Source, read

    try:
        with Path(name).open("rb") as file:
            data = file.read(MAX_PLAN_BYTES + 1)
    except (OSError, ValueError) as error:
        report = Report(Source(name, ""))
        reason = error.strerror if isinstance(error, OSError) else str(error)
        report.error("KV001", f"the file cannot be read: {reason}", None, help="check the path")
        raise PolicyError(report) from error
    found = stage_file.stage_in(data) or "text"
    if wanted is not None and found != wanted:
        raise Usage(f"{name} holds {_thing(found)}, not {_thing(wanted)}")
    if found != "text":
        report = Report(Source(name, ""))
        return stage_file.decode(data, report), report
    policy, report, _ = read(data, name)
    if policy is None:
        raise PolicyError(report)
    return policy, report


def _thing(stage: str) -> str:
    return {"text": "the text of a policy", "plan": "a plan"}.get(stage, f"the stage of `{stage}`")


def _lower(
    to: str, start: Policy | AnyStage, report: Report, args: argparse.Namespace, observe: object = None
) -> AnyStage:
    """Go on from a stage; options that it has settled already may only say the same again."""
    from kvir.lowering.layout import PAGE_TOKENS
    from kvir.lowering.pipeline import PASSES, lower_to, stage_name

    device: str | None = getattr(args, "device", None)
    for option, given, settled in _settled(start, args.dtype, args.page_tokens, device):
        if given is not None and given != settled:
            raise Usage(f"{args.file} is lowered for {option} {settled}, not {given}")
    at = stage_name(start)
    if at is not None and PASSES.index(at) > PASSES.index(to):
        raise Usage(f"{args.file} holds {_thing(at)}, which is past `{to}`")
    model = _model(to, start, args.model, args.file)
    more = {} if observe is None else {"observe": observe}
    return lower_to(
        to,
        start,
        model,
        dtype=args.dtype or (model.dtype if model is not None else "float32"),
        device=device or "cpu",
        page_tokens=args.page_tokens or PAGE_TOKENS,
        report=report,
        **more,  # type: ignore[arg-type]
    )


def _settled(
    start: Policy | AnyStage, dtype: str | None, page_tokens: int | None, device: str | None
) -> Iterator[tuple[str, object, object]]:
    """(option, what is given, what a stage has already)."""
    from kvir.lowering.spec import every_stage
    from kvir.lowering.stages import KernelPlan, LayoutPlan
    from kvir.policy_ir import Policy

    for stage in () if isinstance(start, Policy) else every_stage(start):
        match stage:
            case LayoutPlan():
                yield "dtype", dtype, stage.dtype
                yield "pages of", page_tokens, stage.page_tokens
            case KernelPlan():
                yield "device", device, stage.device
            case _:
                pass


def _model(to: str, start: Policy | AnyStage, folder: str | None, name: str) -> ModelFacts | None:
    """The model of `--model`, or the one in a stage; they must agree."""
    from kvir.lowering.spec import every_stage
    from kvir.lowering.stages import BoundPolicy
    from kvir.policy_ir import Policy

    given = model_in(folder) if folder else None
    stages = () if isinstance(start, Policy) else every_stage(start)
    inside = next((stage.model for stage in stages if isinstance(stage, BoundPolicy)), None)
    if inside is None and given is None and to != "verify":
        raise Usage(f"{name} names no model: give its folder with --model")
    if inside is not None and given is not None and inside.fingerprint != given.fingerprint:
        raise Usage(f"{name} is lowered for another model than the one in {folder}")
    return inside or given


def _layout(start: Policy | AnyStage, report: Report, args: argparse.Namespace) -> LayoutPlan:
    """The layout in a stage, or the one that a stage before it leads to."""
    from kvir.lowering.spec import every_stage
    from kvir.lowering.stages import LayoutPlan
    from kvir.policy_ir import Policy

    for stage in () if isinstance(start, Policy) else every_stage(start):
        if isinstance(stage, LayoutPlan):
            return stage
    args.device = None  # of `show`: the card whose memory is shown
    layout = _lower("layout", start, report, args)
    assert isinstance(layout, LayoutPlan)
    return layout
