"""When rules by score select, and what they govern, as the oracle understands them."""

from __future__ import annotations

from collections.abc import Sequence

from kvir.kernels.ref.select_offer import Governed
from kvir.lowering.stages import Retention
from kvir.policy_ir.nodes import Rule
from kvir.policy_ir.rules import Every, Over, PrefillEnd


def ends(rule: Rule, prompt: int) -> bool:
    """Whether a prompt is long enough for the rule to select at its end; `prefill_end` is the default."""
    triggers = rule.trigger or (PrefillEnd(),)
    return any(isinstance(t, PrefillEnd) and prompt > t.over for t in triggers)


def fires(rule: Rule, generated: int, held: int) -> bool:
    """After so many generated tokens, when a unit holds so many rows."""
    return any(
        (isinstance(t, Every) and generated % t.tokens == 0) or (isinstance(t, Over) and held > t.tokens)
        for t in rule.trigger
    )


def governed_units(table: Sequence[Sequence[Retention]]) -> dict[int, Governed]:
    """By rule that selects: layer -> heads."""
    found: dict[int, dict[int, tuple[int, ...]]] = {}
    for layer, retentions in enumerate(table):
        for head, retention in enumerate(retentions):
            if retention.selection is not None:
                heads = found.setdefault(retention.selection.rule, {})
                heads[layer] = (*heads.get(layer, ()), head)
    return dict(sorted(found.items()))
