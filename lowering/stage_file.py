"""Any stage as a JSON file, so that lowering can stop and go on: deterministic, trusted in nothing when read.

A plan is its own file (`plan_file.py`).  Other stages lie in an envelope that names the stage and the
version.
"""

from __future__ import annotations

import msgspec

from kvir import __version__
from kvir.lowering import plan_file, spec
from kvir.lowering.pipeline import STAGES, stage_name
from kvir.lowering.plan_fingerprint import PLAN_FORMAT
from kvir.lowering.spec import AnyStage
from kvir.lowering.stages import ExecutionPlan
from kvir.policy_ir.diagnostic import Report

_AGAIN = "write it again: `kvir lower POLICY.ir --model DIR --to STAGE -o STAGE.json`"


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a file says about the stage in it."""

    stage: str  # the pass that returned it
    format: int
    kvir_version: str
    body: msgspec.Raw


class _Head(msgspec.Struct, frozen=True):
    """The field that tells a stage file from a policy in JSON."""

    stage: str


def encode(stage: AnyStage) -> bytes:
    """A stage as JSON: equal stages give equal bytes."""
    name = stage_name(stage)
    assert name is not None
    if isinstance(stage, ExecutionPlan):
        return plan_file.encode(stage)
    body = msgspec.Raw(msgspec.json.encode(stage, order="deterministic"))
    envelope = _Envelope(stage=name, format=PLAN_FORMAT, kvir_version=__version__, body=body)
    return msgspec.json.format(msgspec.json.encode(envelope), indent=1) + b"\n"


def stage_in(data: bytes) -> str | None:
    """The stage that a file's bytes are meant as; None for a policy."""
    if not data.lstrip().startswith(b"{"):
        return None
    if plan_file.is_plan(data) and b'"stage"' not in data[:200]:
        return "plan"
    try:
        return msgspec.json.decode(data, type=_Head).stage
    except (msgspec.DecodeError, RecursionError):
        return None


def decode(data: bytes, report: Report) -> AnyStage:
    """The stage of a file, with every stage inside it checked.

    Raises:
        PolicyError: with every reason against the file (KV601, KV602, KV605).
    """
    if stage_in(data) == "plan":
        return plan_file.decode(data, report)
    stage = _decode(data, report)
    report.raise_if_errors()
    assert stage is not None
    for part in spec.every_stage(stage):
        # later stages are derived from earlier ones, so the first broken one tells all
        if rules := spec.broken(part):
            for rule in rules:
                report.error("KV605", f"the stage contradicts itself: {rule}", None, help=_AGAIN)
            break
    report.raise_if_errors()
    return stage


def _decode(data: bytes, report: Report) -> AnyStage | None:
    if len(data) > plan_file.MAX_PLAN_BYTES:
        limit = f"{plan_file.MAX_PLAN_BYTES >> 20} MiB"
        report.error("KV601", f"the stage file is larger than {limit}", None, help=_AGAIN)
        return None
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        if envelope.format != PLAN_FORMAT or envelope.kvir_version != __version__:
            report.error(
                "KV602",
                f"the stage was written by kvir {envelope.kvir_version} (format {envelope.format}); "
                f"this is kvir {__version__} (format {PLAN_FORMAT})",
                None,
                help=_AGAIN,
            )
            return None
        if envelope.stage not in STAGES or envelope.stage == "plan":
            names = ", ".join(STAGES)
            report.error(
                "KV601", f"no stage is called `{envelope.stage[:40]}`", None, help=f"stages: {names}"
            )
            return None
        return msgspec.json.decode(envelope.body, type=STAGES[envelope.stage])
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        report.error("KV601", f"not a stage of kvir: {error}", None, help=_AGAIN)
        return None
