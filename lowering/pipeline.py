"""The whole of lowering, in order.  Read `lower` top down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import ClassVar, Protocol, TypeVar

from kvir import __version__
from kvir.lowering import spec
from kvir.lowering.budget import Budget
from kvir.lowering.graph_buckets import ChooseBuckets
from kvir.lowering.kernel_plan import ChooseKernels
from kvir.lowering.layout import PAGE_TOKENS, Layout
from kvir.lowering.plan_fingerprint import PLAN_FORMAT, plan_fingerprint
from kvir.lowering.resolve import Resolve
from kvir.lowering.spec import AnyStage
from kvir.lowering.stages import Dtype, ExecutionPlan, GraphBuckets, ModelFacts
from kvir.lowering.verify import Verify
from kvir.policy_ir.diagnostic import Report
from kvir.policy_ir.nodes import Policy
from kvir.policy_ir.source import Source

PASSES = ("verify", "resolve", "budget", "layout", "kernels", "buckets", "plan")

In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", bound=AnyStage, covariant=True)
X = TypeVar("X")
Y = TypeVar("Y", bound=AnyStage)
Observer = Callable[[str, AnyStage, float], None]  # name of the pass, its result, seconds


class Pass(Protocol[In, Out]):
    """One step of lowering: a name, options as fields, and one call."""

    name: ClassVar[str]

    def __call__(self, stage: In, /) -> Out: ...


class Stopped(Exception):
    """Lowering reached the pass that it was to stop after."""

    def __init__(self, stage: AnyStage) -> None:
        super().__init__()
        self.stage = stage


class BrokenStage(AssertionError):
    """A pass returned a stage that breaks its spec: a mistake in kvir."""


def _ignore(name: str, stage: AnyStage, seconds: float) -> None: ...


@dataclass(frozen=True)
class Runner:
    """Runs passes: times them, checks what they return, shows it to an observer, and stops where it was told
    to.
    """

    report: Report
    observe: Observer = _ignore
    stop_after: str | None = None

    def __call__(self, step: Pass[X, Y], value: X) -> Y:
        start = perf_counter()
        result = step(value)
        seconds = perf_counter() - start
        # a stage made from a policy with errors only serves to find further errors
        if not self.report.error_count:
            if rules := spec.broken(result):
                raise BrokenStage(f"pass `{step.name}` broke its stage: {'; '.join(rules)}")
            self.observe(step.name, result, seconds)
        if step.name == self.stop_after:
            self.report.raise_if_errors()
            raise Stopped(result)
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


def lower(
    policy: Policy,
    model: ModelFacts,
    *,
    dtype: Dtype,
    device: str = "cpu",
    page_tokens: int = PAGE_TOKENS,
    report: Report | None = None,
    observe: Observer = _ignore,
    stop_after: str | None = None,
) -> ExecutionPlan:
    """Lower a policy for one model, dtype and device.

    `report` is where warnings and errors go, with the spans of its source; give the one that parsing
    returned.

    Raises:
        PolicyError: with every error of the policy.
        Stopped: after the pass `stop_after`, with its stage.
    """
    if report is None:
        report = Report(Source(f"<{policy.name}>", ""))
    run = Runner(report, observe, stop_after)
    verified = run(Verify(report), policy)
    bound = run(Resolve(model, report), verified)
    budgeted = run(Budget(report), bound)
    report.raise_if_errors()
    layout = run(Layout(page_tokens, dtype, report), budgeted)
    report.raise_if_errors()
    kernels = run(ChooseKernels(device, report), layout)
    report.raise_if_errors()
    buckets = run(ChooseBuckets(), kernels)
    return run(Finish(), buckets)


def lower_to(
    stop_after: str,
    policy: Policy,
    model: ModelFacts,
    *,
    dtype: Dtype,
    device: str = "cpu",
    page_tokens: int = PAGE_TOKENS,
    report: Report | None = None,
    observe: Observer = _ignore,
) -> AnyStage:
    """As `lower`, but the stage that the pass `stop_after` returns."""
    if stop_after not in PASSES:
        raise ValueError(f"no pass `{stop_after}`; passes are {', '.join(PASSES)}")
    try:
        return lower(
            policy,
            model,
            dtype=dtype,
            device=device,
            page_tokens=page_tokens,
            report=report,
            observe=observe,
            stop_after=stop_after,
        )
    except Stopped as stopped:
        return stopped.stage
