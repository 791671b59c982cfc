"""What the runtime of this version does not execute, although the language says it and lowering plans it.

Refused by name when a server is to start, never ignored.  Whoever teaches the runtime something deletes it
here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import NODEFAULT, Struct, structs

from kvir.lowering.device_facts import DEVICES
from kvir.lowering.places import place
from kvir.lowering.stages import BudgetedPolicy, ExecutionPlan, KernelChoice, ModelFacts
from kvir.lowering.unsupported_selections import REFUSED_BY, Unsupported, of_selections, tag
from kvir.policy_ir.diagnostic import Report, Severity
from kvir.policy_ir.nodes import All, Policy, Recent, Rule, Sink, TopK, TopP, Windows

# The fields that the runtime gives a meaning to, by struct.
EXECUTED: dict[type[Struct], frozenset[str]] = {
    Policy: frozenset({"kvir", "name", "model", "windows", "rules", "provenance"}),
    Windows: frozenset({"table", "sink"}),
    Rule: frozenset({"keep", "layers", "heads", "phase", "trigger", "overflow", "region"}),
    All: frozenset(),
    Sink: frozenset({"tokens"}),
    Recent: frozenset({"tokens"}),
    TopK: frozenset(
        {
            *("budget", "by", "scope", "counts", "floor", "cap", "safeguard", "tie", "tie_reduce", "block"),
            *("on_equal", "precision"),
        }
    ),
    TopP: frozenset({"mass", "by", "of", "rows", "floor", "cap", "on_equal", "precision"}),
}


def unsupported_by_runtime(plan: ExecutionPlan) -> list[Unsupported]:
    """Everything in a plan that a server of this version cannot execute; empty if it can execute all of
    it."""
    found = unsupported_in_policy(plan.budgeted)
    # on a CPU, kernels are missing only for what the policy was refused for already
    follows = found and DEVICES[plan.buckets.kernels.device].kind == "cpu"
    return found if follows else [*found, *_of_kernels(plan)]


def unsupported_in_policy(budgeted: BudgetedPolicy) -> list[Unsupported]:
    """As `unsupported_by_runtime`, where no device is known yet."""
    policy = budgeted.bound.verified.policy
    return [*_of_model(budgeted.bound.model), *_of_policy(policy), *of_selections(budgeted)]


def refuse(found: list[Unsupported], report: Report, severity: Severity = "error") -> None:
    """Add findings to a report, at their places in the text."""
    say = report.error if severity == "error" else report.warning
    for x in found:
        say(x.code, x.message, None if x.path is None else place(report, x.path), help=x.help)


# ---- parts -------------------------------------------------------------------------------------------------


def _of_model(model: ModelFacts) -> Iterator[Unsupported]:
    without = model.layer_count - len(model.layers)
    if without:
        yield Unsupported(
            code="KV311",
            message="the runtime of this version does not serve models with layers that have no KV cache "
            f"({without} of {model.layer_count} in this one; {REFUSED_BY})",
            path=None,
            help="`kvir show` and `kvir lower` plan for it all the same",
        )


def _of_policy(policy: Policy) -> Iterator[Unsupported]:
    for word, path in unexecuted(policy):
        yield Unsupported(
            code="KV310",
            message=f"the runtime of this version does not execute `{word}` ({REFUSED_BY})",
            path=path,
            help="use `all`, `sink` and `recent`" if ".keep[" in path else f"leave `{word}` out",
        )


def _of_kernels(plan: ExecutionPlan) -> Iterator[Unsupported]:
    kernels = plan.buckets.kernels
    missing: dict[str, KernelChoice] = {c.op: c for c in kernels.choices if not c.built}
    if not missing:
        return
    ops = ", ".join(f"`{op}` ({choice.implementation})" for op, choice in missing.items())
    yield Unsupported(
        code="KV503",
        message=f"kernels for {kernels.device} are not built yet: {ops} ({REFUSED_BY})",
        path=None,
        help="serve with `--device cpu`"
        if kernels.device != "cpu"
        else "serve a policy of `all`, `sink` and `recent`",
    )


def unexecuted(policy: Policy) -> Iterator[tuple[str, str]]:
    """(word of the language, path) of everything in a policy that has no meaning for the runtime."""
    yield from _fields(policy, Policy, "$")
    if policy.windows is not None:
        yield from _fields(policy.windows, Windows, "$.windows")
    for i, rule in enumerate(policy.rules):
        yield from _fields(rule, Rule, f"$.rules[{i}]")
        for j, term in enumerate(rule.keep):
            path = f"$.rules[{i}].keep[{j}]"
            if type(term) in EXECUTED:
                yield from _fields(term, type(term), path)
            else:
                yield tag(term), path


def _fields(value: Struct, cls: type[Struct], path: str) -> Iterator[tuple[str, str]]:
    for name, default in _others(type(value), cls):
        if getattr(value, name) != default:
            yield name, f"{path}.{name}"


@cache
def _others(cls: type[Struct], known: type[Struct]) -> tuple[tuple[str, Any], ...]:
    """Fields that the runtime does not know, with the default that means "as if it were not there"."""
    return tuple(
        (f.name, f.default_factory() if f.default_factory is not NODEFAULT else f.default)
        for f in structs.fields(cls)
        if f.name not in EXECUTED[known]
    )
