"""Plans as JSON files: deterministic, written whole or not at all, trusted in nothing when read (KV6xx)."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec

from kvir import __version__
from kvir.lowering import spec
from kvir.lowering.device_facts import DEVICES
from kvir.lowering.plan_fingerprint import PLAN_FORMAT
from kvir.lowering.stages import Dtype, ExecutionPlan, ModelFacts
from kvir.policy_ir.diagnostic import Report
from kvir.policy_ir.source import Source

MAX_PLAN_BYTES = 64 << 20
_AGAIN = "lower the policy again: `kvir lower POLICY.ir --model DIR -o PLAN.json`"


class _Head(msgspec.Struct, frozen=True):
    """The fields that say what a file is, whatever else is in it."""

    format: int
    kvir_version: str


def encode(plan: ExecutionPlan) -> bytes:
    """The plan as JSON: equal plans give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(plan, order="deterministic"), indent=1) + b"\n"


def save(plan: ExecutionPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan.  Raises OSError; then `path` is as it was."""
    write_atomically(path, encode(plan))


def is_plan(data: bytes) -> bool:
    """Whether a file's bytes are meant as a plan rather than a policy."""
    if not data.lstrip().startswith(b"{"):
        return False
    try:
        msgspec.json.decode(data, type=_Head)
    except (msgspec.DecodeError, RecursionError):
        return b'"kvir_version"' in data
    return True


def load(
    path: str | os.PathLike[str],
    *,
    model: ModelFacts | None = None,
    dtype: Dtype | None = None,
    device: str | None = None,
) -> ExecutionPlan:
    """Read a plan and check all of it: version, every stage's spec, and that it is for this model, dtype and
    device.

    Raises:
        PolicyError: with every reason against the file.
    """
    report = Report(Source(os.fspath(path), ""))
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_PLAN_BYTES + 1)
    except OSError as error:
        report.error("KV601", f"the plan cannot be read: {error.strerror}", None, help="check the path")
        report.raise_if_errors()
        raise AssertionError from error
    return decode(data, report, model=model, dtype=dtype, device=device)


def decode(
    data: bytes,
    report: Report,
    *,
    model: ModelFacts | None = None,
    dtype: Dtype | None = None,
    device: str | None = None,
) -> ExecutionPlan:
    """As `load`, from bytes."""
    plan = _decode(data, report)
    report.raise_if_errors()
    assert plan is not None
    for stage in spec.every_stage(plan):
        # later stages are derived from earlier ones, so the first broken one tells all
        if rules := spec.broken(stage):
            for rule in rules:
                report.error("KV605", f"the plan contradicts itself: {rule}", None, help=_AGAIN)
            break
    if model is not None and (plan.model.fingerprint, plan.model.needs) != (model.fingerprint, model.needs):
        report.error(
            "KV604",
            f"the plan is for another model: `{plan.model.arch}` with {plan.model.layer_count} layers "
            f"(fingerprint {plan.model.fingerprint[:12]}), this is `{model.arch}` with {model.layer_count} "
            f"({model.fingerprint[:12]})",
            None,
            help=_AGAIN,
        )
    planned_device = plan.buckets.kernels.device
    for word, planned, wanted, same in (
        ("dtype", plan.layout.dtype, dtype, plan.layout.dtype == dtype),
        ("device", planned_device, device, _same_device(planned_device, device)),
    ):
        if wanted is not None and not same:
            report.error("KV606", f"the plan is for {word} {planned}, not {wanted}", None, help=_AGAIN)
    report.raise_if_errors()
    return plan


def _same_device(planned: str, wanted: str | None) -> bool:
    """Whether a plan for one device may run on another: a server says `cuda`, a plan may name the card."""
    facts = [DEVICES[name] for name in (planned, wanted) if name in DEVICES]
    return planned == wanted or (len(facts) == 2 and wanted == facts[0].kind)


def _decode(data: bytes, report: Report) -> ExecutionPlan | None:
    if len(data) > MAX_PLAN_BYTES:
        report.error("KV601", f"the plan is larger than {MAX_PLAN_BYTES >> 20} MiB", None, help=_AGAIN)
        return None
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != PLAN_FORMAT or head.kvir_version != __version__:
            report.error(
                "KV602",
                f"the plan was made by kvir {head.kvir_version} (format {head.format}); "
                f"this is kvir {__version__} (format {PLAN_FORMAT})",
                None,
                help=_AGAIN,
            )
            return None
        return msgspec.json.decode(data, type=ExecutionPlan)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        report.error("KV601", f"not a kvir plan: {error}", None, help=_AGAIN)
        return None


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file so that nobody ever sees part of it: a temporary file beside it, synced, then renamed over
    it.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
