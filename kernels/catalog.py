"""What each kernel implementation can do, as data: no torch, no kernel is imported.  Lowering chooses from
this table.

A capability check answers a reason or None, and never tries anything out.  What a row has `planned` is known
well enough to plan with: `kvir show` and `kvir lower` use it where nothing else can do the job, and a server
refuses a plan that needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ATTEND_OPS = ("append", "attend_decode", "attend_extend")
SELECT_OPS = ("sum", "score", "select", "compact")  # only where a plan selects rows by score
SUMMED = ("accumulated", "persistent", "noncausal")  # scores that are sums over all queries (`sum`)

EVERYTHING = "*"  # a feature list that has them all

# Needs of `attend_*` beside those of the model (`lowering.families`).
COMPACT_ROWS = "compact_rows"  # reads what a selection left, beside the residency table
BIASED_ROWS = "biased_rows"  # adds a bias to the logits of rows that were merged
CACHE_POSITIONS = "cache_positions"  # rotates keys to their place in the cache


@dataclass(frozen=True)
class Job:
    """What one op must do, in layers that are alike."""

    device: str  # cpu or cuda
    dtype: str  # of q, k, v and the pool
    head_dim: int
    group_heads: int  # query heads per KV head
    lengths: int  # how many different numbers of rows the heads of one layer hold
    windows: int  # how many different windows they have
    whole: bool = True  # no head has a window, or less than all rows, while a prompt is read
    multiprocessors: int = 0  # of a cuda device
    arch: str = ""  # of a cuda device, e.g. sm_90
    needs: tuple[str, ...] = ()


Rule = Callable[[Job], str | None]


@dataclass(frozen=True)
class Implementation:
    """One implementation of one op.

    devices: device types it runs on.  features: what it has of a job's needs; planned: what it will have.
    head_dims: a multiple and a largest, None for any.  rules: further reasons against it.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    features: tuple[str, ...] = ()
    planned: tuple[str, ...] = ()
    head_dim_multiple: int = 1
    max_head_dim: int | None = None
    rules: tuple[Rule, ...] = ()

    def refusal(self, job: Job) -> str | None:
        """Why this implementation cannot do a job, or None if it can."""
        if job.dtype not in self.dtypes:
            return f"has no {job.dtype} (has {', '.join(self.dtypes)})"
        if job.head_dim % self.head_dim_multiple:
            return f"needs a head size that is a multiple of {self.head_dim_multiple}, not {job.head_dim}"
        if self.max_head_dim is not None and job.head_dim > self.max_head_dim:
            return f"takes head sizes up to {self.max_head_dim}, not {job.head_dim}"
        missing = [n for n in job.needs if not self._has(n) and n not in self.planned]
        if missing:
            return f"lacks {', '.join(missing)}"
        return next((reason for rule in self.rules if (reason := rule(job)) is not None), None)

    def is_built_for(self, job: Job) -> bool:
        """Whether this version of kvir has the implementation, with everything that the job needs."""
        return all(self._has(need) for need in job.needs)

    def _has(self, need: str) -> bool:
        return need in self.features or EVERYTHING in self.features


# ---- tiles -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How a Triton attention kernel is cut: what its compiler is told."""

    rows: int  # rows of K and V at a time
    queries: int  # (token, query head) pairs of a block, padded
    warps: int
    stages: int  # of the pipeline of loads
    blocks: int  # that a multiprocessor holds at once, by registers and shared memory


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STAGE_BYTES = 32 << 10  # K and V of one stage: three blocks with two stages each keep 192 KiB on their way


def decode_tile(head_dim: int, group_heads: int, dtype: str, arch: str = "sm_90") -> Tile:
    """The tile of decode attention; docs/kernels.md has the figures behind it."""
    rows = STAGE_BYTES // (2 * _power_of_2(head_dim) * DTYPE_BYTES[dtype])
    return Tile(
        rows=max(16, min(128, rows)),
        queries=max(16, _power_of_2(group_heads)),  # a matrix product takes 16 at least
        warps=4,
        stages=3,
        blocks=2 if arch == "sm_80" or dtype == "float32" else 3,
    )


def extend_tile(head_dim: int, dtype: str) -> Tile:
    """The tile of prefill attention: the largest whose registers suffice from sm_80 to sm_100."""
    if dtype == "float32":  # three products for each, so that sums are float32's
        return Tile(rows=16, queries=32, warps=4, stages=2, blocks=2)
    return Tile(rows=64 if head_dim <= 128 else 32, queries=64, warps=8, stages=2, blocks=1)


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


# ---- reasons -----------------------------------------------------------------------------------------------

# FlashInfer 0.7 plans on the host, at about 0.1 ms a plan
FLASHINFER_HEAD_DIMS = (64, 128, 256)
PLAN_BLOCKS = 2  # on each multiprocessor: with more rows than that, its planner splits no sequence


def _even_lengths(job: Job) -> str | None:
    if job.lengths == 1:
        return None
    return (
        f"splits no sequence once a batch has {PLAN_BLOCKS * job.multiprocessors} rows, so of {job.lengths} "
        "lengths in a layer the longest runs on alone"
    )


def _host_plan(job: Job) -> str | None:
    return (
        "plans each step on the host, for a grid that its graph fixes; work lists here are part of the graph"
    )


def _one_window(job: Job) -> str | None:
    return None if job.windows == 1 else f"takes one window per launch, not {job.windows}"


def _whole(job: Job) -> str | None:
    return None if job.whole else "would read the window of a prefix through a mask"


def _known_head_dim(job: Job) -> str | None:
    if job.head_dim in FLASHINFER_HEAD_DIMS:
        return None
    return f"has heads of {', '.join(map(str, FLASHINFER_HEAD_DIMS))}, not {job.head_dim}"


def _no_weights(job: Job) -> str | None:
    return "returns outputs and their log-sum-exp, not the weight of each row"


# ---- the table ---------------------------------------------------------------------------------------------

_ALL_DTYPES = ("float32", "bfloat16", "float16")
_HALF = ("bfloat16", "float16")

_CPU = Implementation("cpu", ("cpu",), _ALL_DTYPES)
# Compact rows in decode are pages like others; while a prompt is read the backend attends to them beside it.
_ATTENDS = ("logit_cap", COMPACT_ROWS, BIASED_ROWS)
_CPU_ATTEND = Implementation("cpu", ("cpu",), _ALL_DTYPES, features=_ATTENDS)
_REF = Implementation("ref", ("cpu",), _ALL_DTYPES)
_REF_ATTEND = Implementation("ref", ("cpu",), _ALL_DTYPES, features=_ATTENDS, planned=(CACHE_POSITIONS,))
_REF_SELECT = Implementation("ref", ("cpu", "cuda"), _ALL_DTYPES, features=(EVERYTHING,))  # plain torch

_TRITON = Implementation("triton", ("cuda",), _ALL_DTYPES, max_head_dim=256)
_TRITON_ATTEND = Implementation(
    "triton",
    ("cuda",),
    _ALL_DTYPES,
    features=("logit_cap", COMPACT_ROWS, BIASED_ROWS),
    planned=("learned_sinks", CACHE_POSITIONS),
    head_dim_multiple=16,
    max_head_dim=256,
)
_TRITON_SUM = Implementation(
    "triton", ("cuda",), _ALL_DTYPES, features=SUMMED, head_dim_multiple=16, max_head_dim=256
)


def _flashinfer(*rules: Rule, features: tuple[str, ...] = ("logit_cap",)) -> Implementation:
    return Implementation("flashinfer", ("cuda",), _HALF, features=features, rules=rules)


# Per op, best first.
CATALOG: dict[str, tuple[Implementation, ...]] = {
    "append": (_CPU, _REF, _TRITON),
    "attend_decode": (
        _CPU_ATTEND,
        _REF_ATTEND,
        _flashinfer(_even_lengths, _host_plan, features=("logit_cap", COMPACT_ROWS)),
        _TRITON_ATTEND,
    ),
    "attend_extend": (
        _CPU_ATTEND,
        _REF_ATTEND,
        _flashinfer(_one_window, _whole, _known_head_dim),
        _TRITON_ATTEND,
    ),
    "sum": (_TRITON_SUM, _REF_SELECT),
    "score": (_flashinfer(_no_weights, features=(EVERYTHING,)), _REF_SELECT),
    "select": (_REF_SELECT,),
    "compact": (_TRITON, _REF_SELECT),
}


def candidates(op: str, device: str) -> tuple[Implementation, ...]:
    """The implementations of an op for one type of device, best first."""
    return tuple(x for x in CATALOG[op] if device in x.devices)
