"""The whole of lowering, in order.  Read `next_stage` top down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar, Protocol, TypeVar, assert_never

from kvir import __version__
from kvir.lowering import spec
from kvir.lowering.budget import Budget
from kvir.lowering.graph_buckets import ChooseBuckets
from kvir.lowering.kernel_plan import ChooseKernels
from kvir.lowering.layout import PAGE_TOKENS, Layout
from kvir.lowering.plan_fingerprint import PLAN_FORMAT, plan_fingerprint
from kvir.lowering.resolve import Resolve
from kvir.lowering.spec import AnyStage
from kvir.lowering.stages import (
    BoundPolicy,
    BudgetedPolicy,
    Dtype,
    ExecutionPlan,
    GraphBuckets,
    KernelPlan,
    LayoutPlan,
    ModelFacts,
    VerifiedPolicy,
)
from kvir.lowering.verify import Verify
from kvir.policy_ir.diagnostic import Report
from kvir.policy_ir.nodes import Policy
from kvir.policy_ir.source import Source

# the passes in order, and the stage that each returns
STAGES: dict[str, type[AnyStage]] = {
    "verify": VerifiedPolicy,
    "resolve": BoundPolicy,
    "budget": BudgetedPolicy,
    "layout": LayoutPlan,
    "kernels": KernelPlan,
    "buckets": GraphBuckets,
    "plan": ExecutionPlan,
}
PASSES = tuple(STAGES)

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", bound=AnyStage, covariant=True)
X = TypeVar("X")
Y = TypeVar("Y", bound=AnyStage)
Observer = Callable[[str, AnyStage, float], None]  # name of the pass, its result, seconds


class Pass(Protocol[In, Out]):
    """One step of lowering: a name, options as fields, and one call."""

    name: ClassVar[str]

    def __call__(self, stage: In, /) -> Out: ...


class BrokenStage(AssertionError):
    """A pass returned a stage that breaks its spec: a mistake in kvir."""


def _ignore(name: str, stage: AnyStage, seconds: float) -> None: ...


@dataclass(frozen=True)
class Options:
    """What the passes need beside the stage before them.  `model` is None where no pass to come asks for
    it."""

    model: ModelFacts | None
    dtype: Dtype
    device: str = "cpu"
    page_tokens: int = PAGE_TOKENS


@dataclass(frozen=True)
class Runner:
    """Runs passes: times them, checks what they return, and shows it to an observer."""

    report: Report
    observe: Observer = _ignore

    def __call__(self, step: Pass[X, Y], value: X) -> Y:
        start = perf_counter()
        result = step(value)
        seconds = perf_counter() - start
        # a stage made from a policy with errors only serves to find further errors
        if not self.report.error_count:
            if rules := spec.broken(result):
                raise BrokenStage(f"pass `{step.name}` broke its stage: {'; '.join(rules)}")
            self.observe(step.name, result, seconds)
        return result


@dataclass(frozen=True)
class Finish:
    """GraphBuckets -> ExecutionPlan: stamped with version and fingerprint."""

    name: ClassVar[str] = "plan"

    def __call__(self, buckets: GraphBuckets) -> ExecutionPlan:
        return ExecutionPlan(
            format=PLAN_FORMAT,
            kvir_version=__version__,
            fingerprint=plan_fingerprint(buckets.kernels.layout),
            buckets=buckets,
        )


def next_stage(stage: Policy | AnyStage, options: Options, run: Runner) -> AnyStage:
    """One step.  The first three passes go on after errors, so that all of a policy's are found."""
    report = run.report
    match stage:
        case Policy():
            return run(Verify(report), stage)
        case VerifiedPolicy():
            if options.model is None:
                raise ValueError("the pass `resolve` needs a model")
            return run(Resolve(options.model, report), stage)
        case BoundPolicy():
            return run(Budget(report), stage)
        case BudgetedPolicy():
            report.raise_if_errors()
            return run(Layout(options.page_tokens, options.dtype, report), stage)
        case LayoutPlan():
            report.raise_if_errors()
            return run(ChooseKernels(options.device, report), stage)
        case KernelPlan():
            report.raise_if_errors()
            return run(ChooseBuckets(), stage)
        case GraphBuckets():
            return run(Finish(), stage)
        case ExecutionPlan():
            raise ValueError("a plan is the last stage")
        case _:
            assert_never(stage)


def lower_to(
    stop_after: str,
    start: Policy | AnyStage,
    model: ModelFacts | None,
    *,
    dtype: Dtype,
    device: str = "cpu",
    page_tokens: int = PAGE_TOKENS,
    report: Report | None = None,
    observe: Observer = _ignore,
) -> AnyStage:
    """The stage that the pass `stop_after` returns, from a policy or from any stage before it.

    `report` is where warnings and errors go, with the spans of its source; give the one that parsing
    returned.

    Raises:
        PolicyError: with every error of the policy.
        ValueError: no such pass, or `start` is past it.
    """
    if stop_after not in STAGES:
        raise ValueError(f"no pass `{stop_after}`; passes are {', '.join(PASSES)}")
    at = stage_name(start)
    if at is not None and PASSES.index(at) > PASSES.index(stop_after):
        raise ValueError(f"the stage is that of `{at}`, past `{stop_after}`")
    if report is None:
        report = Report(Source(f"<{policy_of(start).name}>", ""))
    options = Options(model, dtype, device, page_tokens)
    run = Runner(report, observe)
    stage = start
    while isinstance(stage, Policy) or stage_name(stage) != stop_after:
        stage = next_stage(stage, options, run)
    report.raise_if_errors()
    return stage


def lower(
    policy: Policy,
    model: ModelFacts,
    *,
    dtype: Dtype,
    device: str = "cpu",
    page_tokens: int = PAGE_TOKENS,
    report: Report | None = None,
    observe: Observer = _ignore,
) -> ExecutionPlan:
    """Lower a policy for one model, dtype and device.

    Raises:
        PolicyError: with every error of the policy.
    """
    plan = lower_to(
        "plan",
        policy,
        model,
        dtype=dtype,
        device=device,
        page_tokens=page_tokens,
        report=report,
        observe=observe,
    )
    assert isinstance(plan, ExecutionPlan)
    return plan


def stage_name(stage: Policy | AnyStage) -> str | None:
    """The pass that made a stage; None for a policy, which no pass made."""
    return next((name for name, cls in STAGES.items() if type(stage) is cls), None)


def policy_of(stage: Policy | AnyStage) -> Policy:
    """The policy inside a stage."""
    if isinstance(stage, Policy):
        return stage
    first = spec.every_stage(stage)[0]
    assert isinstance(first, VerifiedPolicy)
    return first.policy
