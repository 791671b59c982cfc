"""The rules by score of a plan: which units they govern, and which queries they must see."""

from __future__ import annotations

from dataclasses import dataclass

from kvir.kernels.ref.score_needs import observed_queries, term_scores
from kvir.kernels.ref.select_offer import Governed
from kvir.kernels.ref.select_rule import spans_layers
from kvir.lowering.compact import block_tokens
from kvir.lowering.stages import ExecutionPlan
from kvir.policy_ir.nodes import Phase, Rule
from kvir.policy_ir.rules import Every, Merge
from kvir.policy_ir.scores import Score


@dataclass(frozen=True)
class Selecting:
    """One rule by score, and the units that it governs in one phase."""

    rule: Rule
    governed: Governed

    @property
    def last_layer(self) -> int:
        return max(self.governed)

    @property
    def block_tokens(self) -> int | None:
        """Tokens of a prompt between two selections; None: it selects once, at the end."""
        return block_tokens(self.rule.trigger)

    @property
    def waits(self) -> bool:
        return spans_layers(self.rule)


def selecting_rules(plan: ExecutionPlan, phase: Phase) -> dict[int, Selecting]:
    """Rules that select in a phase, by their number in the policy."""
    governed: dict[int, dict[int, list[int]]] = {}
    table = plan.budgeted.prefill if phase == "prefill" else plan.budgeted.decode
    for layer, retentions in enumerate(table):
        for head, retention in enumerate(retentions):
            if retention.selection is not None:
                governed.setdefault(retention.selection.rule, {}).setdefault(layer, []).append(head)
    return {
        number: Selecting(plan.policy.rules[number], {layer: tuple(heads) for layer, heads in layers.items()})
        for number, layers in sorted(governed.items())
    }


def rule_scores(rule: Rule) -> list[Score]:
    return [score for term in rule.keep for score in term_scores(term)]


def merge_queries(rule: Rule) -> int:
    """The last queries that a rule's merges refer to."""
    return rule.overflow.queries if isinstance(rule.overflow, Merge) else 0


def observed_at_prompt_end(plan: ExecutionPlan) -> int | None:
    """Queries at a prompt's end that must be computed, not taken from the prefix cache; None: all of them."""
    rules = selecting_rules(plan, "prefill").values()
    counts = [observed_queries(score) for each in rules for score in rule_scores(each.rule)]
    return None if None in counts else max((n for n in counts if n is not None), default=0)


def observed_in_blocks(plan: ExecutionPlan) -> int:
    """Queries before the end of a block that are computed, so that the block's selection runs: at least the
    last one, and those that it observes.
    """
    rules = (each for each in selecting_rules(plan, "prefill").values() if each.block_tokens is not None)
    counts = (observed_queries(score) or 0 for each in rules for score in rule_scores(each.rule))
    return max(1, max(counts, default=0))


def observed_in_decode(plan: ExecutionPlan) -> int:
    """Of the queries at a prompt's end, those that the first selection of decode observes still."""
    most = 0
    for each in selecting_rules(plan, "decode").values():
        first = min((t.tokens for t in each.rule.trigger if isinstance(t, Every)), default=1)
        counts = [observed_queries(score) or 0 for score in rule_scores(each.rule)]
        most = max(most, *(count - first for count in (*counts, merge_queries(each.rule))))
    return most
