"""LayoutPlan -> KernelPlan: an implementation per op and group of layers, and why not the others (KV5xx)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

from msgspec import Struct
from msgspec.structs import replace

from kvir.kernels.catalog import (
    ATTEND_OPS,
    BIASED_ROWS,
    CACHE_POSITIONS,
    COMPACT_ROWS,
    SELECT_OPS,
    SUMMED,
    Job,
    candidates,
    decode_tile,
    extend_tile,
)
from kvir.lowering.device_facts import DEVICES, DeviceFacts, multiprocessors
from kvir.lowering.layout import biased
from kvir.lowering.selections import tag
from kvir.lowering.stages import (
    BudgetedPolicy,
    KernelChoice,
    KernelPlan,
    KernelTile,
    LayoutPlan,
    MassAmount,
    OpenAmount,
    Selection,
)
from kvir.policy_ir.diagnostic import Report
from kvir.policy_ir.nodes import Rule, TopK, TopP
from kvir.policy_ir.rules import Merge, PrefillChunk
from kvir.policy_ir.scores import ScoreBase


@dataclass(frozen=True)
class ChooseKernels:
    name: ClassVar[str] = "kernels"
    device: str
    report: Report

    def __call__(self, layout: LayoutPlan) -> KernelPlan:
        if self.device not in DEVICES:
            self.report.error(
                "KV502",
                f"unknown device `{self.device}`",
                None,
                help=f"known devices: {', '.join(DEVICES)}",
            )
            self.report.raise_if_errors()
        choices = kernel_choices(layout, self.device)
        for choice in choices:
            if not choice.implementation:
                reasons = "; ".join(f"`{name}` {reason}" for name, reason in choice.rejected)
                self.report.error(
                    "KV501",
                    f"no kernel for `{choice.op}` of this model: {reasons}",
                    None,
                    help="serve this model without `--kv-ir`, or choose another dtype or device",
                )
        return KernelPlan(layout=layout, device=self.device, choices=choices)


def kernel_choices(layout: LayoutPlan, device: str) -> tuple[KernelChoice, ...]:
    """What every op does in every layer; layers for which an op has the same job share a choice."""
    return tuple(choice for op in (*ATTEND_OPS, *SELECT_OPS) for choice in _choices(op, layout, device))


def _choices(op: str, layout: LayoutPlan, device: str) -> Iterator[KernelChoice]:
    layers = layout.budgeted.bound.model.layers
    by_job: dict[Job, KernelChoice] = {}
    ids: dict[KernelChoice, list[int]] = {}
    for index, layer in enumerate(layers):
        job = layer_job(op, layout, index, DEVICES[device])
        if job is not None:
            if job not in by_job:
                by_job[job] = choose(op, job)
            choice = by_job[job]
            ids.setdefault(choice, []).append(layer.layer_id)
    for choice, chosen in ids.items():
        yield choice if len(chosen) == len(layers) else replace(choice, layers=tuple(chosen))


def choose(op: str, job: Job) -> KernelChoice:
    """The first implementation of `op` that can do a job and is built, else the first that will be; an empty
    name if none can."""
    found = [(x, x.refusal(job)) for x in candidates(op, job.device)]
    able = [x for x, reason in found if reason is None]
    chosen = next((x for x in able if x.is_built_for(job)), able[0] if able else None)
    name = "" if chosen is None else chosen.name
    rejected: list[tuple[str, str]] = []
    for x, reason in found:
        if reason is not None:
            rejected.append((x.name, reason))
        elif x is not chosen and not x.is_built_for(job):
            rejected.append((x.name, "is not built yet"))
        elif x is not chosen:
            rejected.append((x.name, f"comes after `{name}`"))
    return KernelChoice(
        op=op,
        implementation=name,
        rejected=tuple(rejected),
        tile=_tile(op, job) if name == "triton" else None,
        built=chosen is None or chosen.is_built_for(job),
    )


def _tile(op: str, job: Job) -> KernelTile | None:
    match op:
        case "attend_decode":
            tile = decode_tile(job.head_dim, job.group_heads, job.dtype, job.arch)
        case "attend_extend":
            tile = extend_tile(job.head_dim, job.dtype)
        case _:
            return None
    return KernelTile(
        rows=tile.rows, queries=tile.queries, warps=tile.warps, stages=tile.stages, blocks=tile.blocks
    )


# ---- jobs --------------------------------------------------------------------------------------------------


def layer_job(op: str, layout: LayoutPlan, index: int, device: DeviceFacts) -> Job | None:
    """What an op must do in the attention layer `index`; None if there is nothing to do."""
    budgeted = layout.budgeted
    prefill, decode = budgeted.prefill[index], budgeted.decode[index]
    selections = [r.selection for r in (*prefill, *decode) if r.selection is not None]
    if op in SELECT_OPS and not selections:
        return None
    lengths, windows, whole = 1, 1, True
    needs: tuple[str, ...] = ()
    if op == "attend_decode":
        lengths = _lengths([(a.selection, b) for a, b in zip(prefill, decode, strict=True)], selections)
        needs = _attend_needs(layout, index, selections)
        needs += (BIASED_ROWS,) if biased(budgeted) else ()
    elif op == "attend_extend":
        whole = prefill_is_whole(budgeted, index)
        windows = 1 if whole else len(set(prefill))
        chunked = [s for s in selections if any(isinstance(t, PrefillChunk) for t in s.triggers)]
        lengths = _lengths([r.selection for r in prefill], chunked) if chunked else 1
        needs = _attend_needs(layout, index, chunked)
    elif op in SELECT_OPS:
        rules = [budgeted.bound.verified.policy.rules[i] for i in sorted({s.rule for s in selections})]
        needs = tuple(sorted({need for rule in rules for need in _select_needs(op, rule)}))
        if op == "sum" and not needs:
            return None
    return Job(
        device=device.kind,
        dtype=layout.dtype,
        head_dim=layout.head_dim,
        group_heads=layout.query_heads // layout.kv_heads,
        lengths=lengths,
        windows=windows,
        whole=whole,
        multiprocessors=multiprocessors(device),
        arch=device.arch,
        needs=needs,
    )


def prefill_is_whole(budgeted: BudgetedPolicy, index: int) -> bool:
    """Whether every head of the attention layer `index` sees all rows before it while a prompt is read."""
    return all(
        r.recent_tokens is None
        and (r.selection is None or not any(isinstance(t, PrefillChunk) for t in r.selection.triggers))
        for r in budgeted.prefill[index]
    )


def _lengths(kept: Sequence[object], selections: Sequence[Selection]) -> int:
    """How many lengths the heads of a layer have; any number, where scores decide."""
    open_ended = any(
        q.group > 1 or isinstance(q.amount, MassAmount | OpenAmount) for s in selections for q in s.quotas
    )
    return len(kept) if open_ended else len(set(kept))


def _attend_needs(layout: LayoutPlan, index: int, selections: Sequence[Selection]) -> tuple[str, ...]:
    bound = layout.budgeted.bound
    governing = {*bound.prefill_rule[index], *bound.decode_rule[index]}
    rotated = any(bound.verified.policy.rules[i].positions == "cache" for i in governing if i >= 0)
    return (
        *bound.model.needs,
        *((COMPACT_ROWS,) if selections else ()),
        *((CACHE_POSITIONS,) if rotated else ()),
    )


def _select_needs(op: str, rule: Rule) -> Iterator[str]:
    """What a rule asks of `sum`, `score`, `select` or `compact`."""
    for term in rule.keep:
        match op, term:
            case "sum", TopK() | TopP():
                yield from (word for word in _score_tags(term) if word in SUMMED)
            case "score", TopK() | TopP():
                yield from _score_tags(term)
            case "select", TopK():
                yield f"top_k of a {term.scope}"
                yield from (("tied rows",) if term.tie else ())
                yield from (("blocks",) if term.block > 1 else ())
            case "select", TopP():
                yield "top_p"
            case _:
                pass
    if op == "compact" and isinstance(rule.overflow, Merge):
        yield "merge"


def _score_tags(node: Struct) -> Iterator[str]:
    """The scores that a term uses, those inside others too."""
    if isinstance(node, ScoreBase):
        yield tag(node)
    for name in node.__struct_fields__:
        value = getattr(node, name)
        parts = cast("tuple[object, ...]", value) if isinstance(value, tuple) else (value,)
        for part in parts:
            if isinstance(part, Struct):
                yield from _score_tags(part)
