"""What a server calls: a policy or plan file and a model folder -> ExecutionPlan.  No torch."""

from __future__ import annotations

import os
from pathlib import Path

from kvir.lowering import plan_file
from kvir.lowering.model_facts import load_model
from kvir.lowering.pipeline import lower
from kvir.lowering.stages import Dtype, ExecutionPlan
from kvir.lowering.unsupported import refuse, unsupported_by_runtime
from kvir.policy_ir.diagnostic import PolicyError, Report
from kvir.policy_ir.parse import read
from kvir.policy_ir.source import Source


def plan_for_server(
    path: str | os.PathLike[str],
    model_dir: str | os.PathLike[str],
    *,
    dtype: Dtype,
    device: str = "cpu",
    page_tokens: int = 16,
    warnings: list[Report] | None = None,
) -> ExecutionPlan:
    """The plan to serve: a policy (`.ir`) is lowered now, a plan (JSON) is read and checked against the
    model.

    A report with warnings only is appended to `warnings`.

    Raises:
        PolicyError: its text names everything that is wrong with the policy, the plan, or the model folder,
        or
            what the runtime does not execute.
    """
    name = os.fspath(path)
    model = load_model(model_dir)
    report = Report(Source(name, ""))
    try:
        with Path(name).open("rb") as file:
            data = file.read(plan_file.MAX_PLAN_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        report.error("KV001", f"the file cannot be read: {reason}", None, help="check the path")
        raise PolicyError(report) from error
    if plan_file.is_plan(data):
        plan = plan_file.decode(data, report, model=model, dtype=dtype, device=device)
        if plan.layout.page_tokens != page_tokens:
            report.error(
                "KV606",
                f"the plan is for pages of {plan.layout.page_tokens} tokens, not {page_tokens}",
                None,
                help=f"lower the policy again with `--page-tokens {page_tokens}`",
            )
            raise PolicyError(report)
        refuse(unsupported_by_runtime(plan), report)
        report.raise_if_errors()
        return plan
    policy, report, _ = read(data, name)
    if policy is None:
        raise PolicyError(report)
    plan = lower(policy, model, dtype=dtype, device=device, page_tokens=page_tokens, report=report)
    refuse(unsupported_by_runtime(plan), report)
    report.raise_if_errors()
    if warnings is not None and len(report):
        warnings.append(report)
    return plan
