"""Of the rules by score, what the runtime of this version does not execute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from msgspec import Struct

from kvir.lowering.layout import PAGE_TOKENS
from kvir.lowering.stages import BudgetedPolicy, MassAmount, OpenAmount
from kvir.policy_ir.budgets import Preference
from kvir.policy_ir.nodes import Rule, TopK, TopP
from kvir.policy_ir.rules import Every, Evict, Over, PrefillChunk
from kvir.policy_ir.scores import (
    Accumulated,
    CriticalKV,
    ExpectedAttention,
    Noncausal,
    Persistent,
    ValueLeverage,
)

Table = tuple[tuple[int, ...], ...]
SUMS = (Accumulated, Persistent, Noncausal, ExpectedAttention, ValueLeverage)  # over many queries
REFUSED_BY = "refused by the stage `runtime`"


class Unsupported(Struct, frozen=True):
    """One thing that a server of this version would not do."""

    code: str
    message: str
    path: str | None  # in the policy
    help: str


def of_selections(budgeted: BudgetedPolicy) -> Iterator[Unsupported]:
    """Rules by score are executed when a prompt ends, and what they leave stays to the end of the request."""
    rules = budgeted.bound.verified.policy.rules
    governing = budgeted.bound.prefill_rule, budgeted.bound.decode_rule
    used = {rule for table in governing for row in table for rule in row if rule >= 0}
    for i in sorted(used):
        rule = rules[i]
        if not any(isinstance(term, TopK | TopP) for term in rule.keep):
            continue
        for j, trigger in enumerate(rule.trigger):
            if isinstance(trigger, PrefillChunk):
                yield from _after_blocks(budgeted, i, trigger, f"$.rules[{i}].trigger[{j}]")
        if not isinstance(rule.overflow, Evict) and not _only_while_decoding(rule, i, governing):
            help = "merge while decoding: `trigger: {every: n}` or `{over: n}`, nothing else"
            yield _refused("merge", f"$.rules[{i}].overflow", help)
        for j, term in enumerate(rule.keep):
            match term:
                case TopK(budget=Preference(), by=CriticalKV()):
                    help = "give `criticalkv` a budget that does not depend on scores"
                    yield _refused("criticalkv", f"$.rules[{i}].keep[{j}]", help)
                case _:
                    pass
        yield from _while_decoding(budgeted, i)
    narrowed: set[int] = set()
    for row, later, governing_row in zip(
        budgeted.prefill, budgeted.decode, budgeted.bound.decode_rule, strict=True
    ):
        for before, after, rule in zip(row, later, governing_row, strict=True):
            windowed = after.recent_tokens is not None
            if before.selection is not None and windowed and rule not in narrowed:
                narrowed.add(rule)
                yield _refused(
                    "recent",
                    None if rule < 0 else f"$.rules[{rule}]",
                    "units that select when a prompt ends keep what is left and all later rows",
                    "a window in decode over rows that prefill chose by score",
                )


def _only_while_decoding(rule: Rule, number: int, governing: tuple[Table, Table]) -> bool:
    in_prefill = any(number in row for row in governing[0])
    return not in_prefill or (
        rule.trigger != () and all(isinstance(trigger, Every | Over) for trigger in rule.trigger)
    )


def _after_blocks(
    budgeted: BudgetedPolicy, number: int, trigger: PrefillChunk, path: str
) -> Iterator[Unsupported]:
    """Blocks of a prompt are whole pages, and how many rows a head keeps after one is known before."""
    rule = budgeted.bound.verified.policy.rules[number]
    if trigger.tokens is None or trigger.tokens % PAGE_TOKENS:
        what = "`prefill_chunk` after the server's own chunks, or after part of a page"
        yield _refused("prefill_chunk", path, f"give it a multiple of {PAGE_TOKENS} tokens", what)
    selections = (r.selection for row in budgeted.prefill for r in row)
    quotas = [q for s in selections if s is not None and s.rule == number for q in s.quotas]
    if any(q.group > 1 or q.block > 1 or isinstance(q.amount, MassAmount | OpenAmount) for q in quotas):
        what = "`prefill_chunk` where heads keep different numbers of rows"
        yield _refused("prefill_chunk", path, "select with `prefill_end`", what)
    for word in sorted({tag(s) for term in rule.keep for s in _structs(term) if isinstance(s, SUMS)}):
        what = f"`{word}`, a sum over queries, after blocks of a prompt"
        yield _refused(word, path, "select with `prefill_end`", what)


def _while_decoding(budgeted: BudgetedPolicy, number: int) -> Iterator[Unsupported]:
    """A selection of decode looks at the last queries and at keys and values, layer by layer."""
    rule, path = budgeted.bound.verified.policy.rules[number], f"$.rules[{number}]"
    pairs = [
        pair
        for row, later in zip(budgeted.prefill, budgeted.decode, strict=True)
        for pair in zip(row, later, strict=True)
        if pair[1].selection is not None and pair[1].selection.rule == number
    ]
    if not pairs:
        return
    quotas = [quota for _, after in pairs if after.selection is not None for quota in after.selection.quotas]
    sums = {tag(s) for term in rule.keep for s in _structs(term) if isinstance(s, SUMS)}
    for word in sorted(sums):
        what = f"`{word}`, a sum over queries, while decoding"
        yield _refused(word, path, "select with `prefill_end`", what)
    for term in rule.keep:
        match term:
            case TopK(scope="model") | TopK(tie="model") | TopK(budget=Preference()):
                what = "a choice among all layers while decoding"
                yield _refused("model", path, "let heads compete in their layer, or not at all", what)
            case _:
                pass
    over = any(isinstance(trigger, Over) for trigger in rule.trigger)
    if over and any(quota.group > 1 or isinstance(quota.amount, MassAmount | OpenAmount) for quota in quotas):
        what = "`over` where heads keep different numbers of rows"
        yield _refused("over", path, "select with `every`", what)
    if any(before.recent_tokens is not None and before.selection is None for before, _ in pairs):
        what = "a choice by score in decode over what a window of prefill left"
        yield _refused("recent", path, "keep the whole prompt, or select when it ends", what)


def _structs(value: object) -> Iterator[object]:
    """Every struct inside a term: scores, and the scores in them."""
    if isinstance(value, Struct):
        yield value
        for name in value.__struct_fields__:
            yield from _structs(getattr(value, name))
    elif isinstance(value, tuple):
        for item in cast("tuple[object, ...]", value):
            yield from _structs(item)


def _refused(word: str, path: str | None, help: str, what: str | None = None) -> Unsupported:
    subject = f"`{word}`" if what is None else what
    message = f"the runtime of this version does not execute {subject} ({REFUSED_BY})"
    return Unsupported(code="KV310", message=message, path=path, help=help)


def tag(term: object) -> str:
    """The word that stands for a struct in the text."""
    config: object = getattr(term, "__struct_config__", None)
    return str(getattr(config, "tag", None) or type(term).__name__)
