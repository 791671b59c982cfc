"""Retentions, selections and page spans in a few words, for stages in print and for messages."""

from __future__ import annotations

from typing import assert_never

from kvir.lowering.stages import (
    KernelTile,
    MassAmount,
    OpenAmount,
    PageSpan,
    Quota,
    RampAmount,
    Retention,
    RowsAmount,
    Selection,
    ShareAmount,
    TotalAmount,
)
from kvir.policy_ir.budgets import Blend, Protect
from kvir.policy_ir.nodes import Trigger
from kvir.policy_ir.rules import Every, Over, PrefillChunk, PrefillEnd


def words(retention: Retention) -> str:
    """`sink 4, recent 1024`; with a selection `recent 32, 992 by attention at prefill_end`."""
    if retention.selection is not None:
        return selection_words(retention.selection)
    if retention.recent_tokens is None:
        return "all"
    return _by_position(retention.sink_tokens, retention.recent_tokens)


def selection_words(selection: Selection) -> str:
    terms = [_by_position(selection.sink_tokens, selection.recent_tokens)]
    terms += [quota_words(quota) for quota in selection.quotas]
    when = " and ".join(trigger_words(t) for t in selection.triggers)
    where = "" if selection.region == "all" else f" among {selection.region} rows"
    return f"{', '.join(t for t in terms if t)}{where} {when}"


def quota_words(quota: Quota) -> str:
    """`992 by attention`; of rivals also how many share what."""
    rows = amount_words(quota)
    if quota.group > 1:
        each = "" if isinstance(quota.amount, TotalAmount) else " each"
        rows += f"{each} for {quota.group} units of {'a layer' if quota.scope == 'layer' else 'the model'}"
    bounds = [f"at least {quota.floor:,}"] if quota.floor else []
    bounds += [f"at most {quota.cap:,}"] if quota.cap is not None else []
    match quota.safeguard:
        case None:
            pass
        case Blend(share=share):
            bounds.append(f"blended {share:g}")
        case Protect(share=share):
            bounds.append(f"{share:g} protected")
        case _:
            assert_never(quota.safeguard)
    bounds += [f"in blocks of {quota.block}"] if quota.block > 1 else []
    of = f" of {quota.of}" if quota.of else ""
    return f"{rows}{of} by {quota.by}" + (f" ({', '.join(bounds)})" if bounds else "")


def amount_words(quota: Quota) -> str:
    """The rows of one term; `inside` is taken off where the figure is one."""
    less = f" less {quota.inside:,}" if quota.inside else ""
    match quota.amount:
        case RowsAmount(rows=rows):
            return f"{max(0, rows - quota.inside):,}"
        case ShareAmount(share=share, of=of):
            return f"{share:.4g} of the {of}{less}"
        case TotalAmount(rows=rows):
            return f"{max(0, rows - quota.inside * quota.group):,} in all"
        case RampAmount(mean=mean, index=index, count=count):
            return f"{max(0, mean - quota.inside):,} on a ramp ({index + 1} of {count})"
        case MassAmount(mass=mass):
            return f"{mass:.4g} of the mass"
        case OpenAmount():
            return "as many as its layer is given"
        case _:
            assert_never(quota.amount)


def trigger_words(trigger: Trigger) -> str:
    match trigger:
        case PrefillChunk(tokens=None):
            return "at prefill_chunk"
        case PrefillChunk(tokens=tokens):
            return f"at prefill_chunk of {tokens:,}"
        case PrefillEnd(over=over):
            return f"at prefill_end over {over:,}" if over else "at prefill_end"
        case Every(tokens=tokens):
            return f"every {tokens:,}"
        case Over(tokens=tokens):
            return f"over {tokens:,} rows"
        case _:
            assert_never(trigger)


def span_words(span: PageSpan) -> str:
    if span.window_pages is None:
        return "every page"
    return f"{span.sink_pages} sink + {span.window_pages} window pages"


def _by_position(sink: int, recent: int) -> str:
    terms = [f"sink {sink}"] if sink else []
    terms += [f"recent {recent}"] if recent else []
    return ", ".join(terms)


def tile_words(tile: KernelTile) -> str:
    """`64 rows, 4 warps, 3 stages, 3 blocks`."""
    blocks = f"{tile.blocks} block" + ("s" if tile.blocks > 1 else "")
    return f"{tile.rows} rows, {tile.warps} warps, {tile.stages} stages, {blocks}"
