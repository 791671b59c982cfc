"""Selections, budgets and windows that a model makes pointless: warnings of the pass `budget`, once per
rule."""

from __future__ import annotations

from collections.abc import Iterator

from kvir.lowering.places import place, rule_place
from kvir.lowering.selections import figure, positions, selects
from kvir.lowering.stages import BoundPolicy
from kvir.policy_ir.budgets import FixedTokens, Fraction, Total
from kvir.policy_ir.diagnostic import Report
from kvir.policy_ir.nodes import Recent, Rule, TopK, TopP

# At this share of 1,024 tokens no uniform method found a hidden number again (SmolLM2-135M).
SHARE_THAT_FINDS_NOTHING = 0.05


def check_selections(bound: BoundPolicy, report: Report) -> None:
    """KV303 to KV306."""
    for i, rule in enumerate(bound.verified.policy.rules):
        units = list(_governed(bound, i))
        if units and selects(rule):
            _in_native_windows(bound, i, units, report)
            _nothing_left(bound, i, units, report)
        if units:
            _beyond_the_context(bound, i, report)
    _table_beyond_the_context(bound, report)
    _too_little_everywhere(bound, report)


def _governed(bound: BoundPolicy, rule: int) -> Iterator[tuple[int, int]]:
    """(layer_index, KV head) of the units that a rule governs in some phase."""
    for layer, rows in enumerate(zip(bound.prefill_rule, bound.decode_rule, strict=True)):
        for head, governing in enumerate(zip(*rows, strict=True)):
            if rule in governing:
                yield layer, head


def _in_native_windows(bound: BoundPolicy, i: int, units: list[tuple[int, int]], report: Report) -> None:
    for layer, _ in units:
        facts = bound.model.layers[layer]
        if facts.native_window_tokens is not None:
            report.warning(
                "KV303",
                f"the selection has no effect in layer {facts.layer_id}, whose own sliding window is "
                f"{facts.native_window_tokens} tokens: it keeps that window",
                rule_place(report, i),
                help="leave the sliding layers out of the rule; they are cheap already",
            )
            return


def _nothing_left(bound: BoundPolicy, i: int, units: list[tuple[int, int]], report: Report) -> None:
    rule = bound.verified.policy.rules[i]
    others = sum(positions(rule))
    for j, term in enumerate(rule.keep):
        if not isinstance(term, TopK) or term.counts != "kept":
            continue
        if isinstance(term.budget, Total):
            rivals = units if term.scope == "model" else [u for u in units if u[0] == units[0][0]]
            short = [(term.budget.tokens, units[0], len(rivals) if term.scope != "head" else 1)]
        else:
            short = [(rows, u, 1) for u in units if isinstance(rows := figure(term, u), int)]
        for rows, (layer, head), count in short:
            if rows <= others * count:
                where = f"layer {bound.model.layers[layer].layer_id}, head {head}"
                what = f"{count} units have {rows} rows together" if count > 1 else f"{where} has {rows} rows"
                report.warning(
                    "KV304",
                    f"{what}, and the other terms keep {others * count} of them: nothing is left to select",
                    place(report, f"$.rules[{i}].keep[{j}].budget"),
                    help=f"give more than {others} rows to each unit, or use `counts: selected`",
                )
                break


def _beyond_the_context(bound: BoundPolicy, i: int, report: Report) -> None:
    context = bound.model.context_tokens
    for j, term in enumerate(bound.verified.policy.rules[i].keep):
        match term:
            case Recent(tokens=tokens) if tokens > context:
                what = f"a window of {tokens:,} tokens"
            case TopK(budget=FixedTokens(tokens=tokens)) if tokens >= context:
                what = f"a budget of {tokens:,} rows"
            case _:
                continue
        report.warning(
            "KV305",
            f"{what} keeps everything: the model's context is {context:,} tokens",
            place(report, f"$.rules[{i}].keep[{j}]"),
            help="write `all` where nothing should go, or a smaller figure",
        )


def _table_beyond_the_context(bound: BoundPolicy, report: Report) -> None:
    windows = bound.verified.policy.windows
    if windows is None or report.error_count:
        return
    context = bound.model.context_tokens
    for layer, row in enumerate(windows.table):
        for head, tokens in enumerate(row):
            if tokens is not None and tokens > context:
                report.warning(
                    "KV305",
                    f"a window of {tokens:,} tokens keeps everything: "
                    f"the model's context is {context:,} tokens",
                    place(report, f"$.windows.table[{layer}][{head}]"),
                    help="write `full` where nothing should go",
                )
                return


def _too_little_everywhere(bound: BoundPolicy, report: Report) -> None:
    rules = bound.verified.policy.rules
    scarce = {i for i, rule in enumerate(rules) if _share(rule) <= SHARE_THAT_FINDS_NOTHING}
    for layer, facts in enumerate(bound.model.layers):
        if facts.native_window_tokens is not None:
            continue
        governing = zip(bound.prefill_rule[layer], bound.decode_rule[layer], strict=True)
        if not all(scarce & set(phases) for phases in governing):
            return
    for i in sorted(scarce):
        report.warning(
            "KV306",
            f"every head keeps at most {_share(rules[i]):.0%} of the rows: do not expect it to find a fact "
            "again",
            place(report, f"$.rules[{i}]"),
            help="keep everything in the heads that retrieve (`kvir calibrate polykv` finds them), or give "
            "more rows",
        )
        return


def _share(rule: Rule) -> float:
    """Of a sequence, as far as a share is what the rule says."""
    shares = [t.budget.share for t in rule.keep if isinstance(t, TopK) and isinstance(t.budget, Fraction)]
    by_score = sum(isinstance(t, TopK | TopP) for t in rule.keep)
    return sum(shares) if shares and len(shares) == by_score else 1.0
