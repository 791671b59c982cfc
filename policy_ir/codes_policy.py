"""KV1xx: what is wrong with a policy by itself, before any model is known."""

from __future__ import annotations

from kvir.policy_ir.codes import Code

POLICY: dict[str, Code] = {
    "KV101": Code(
        "unknown language version",
        "`kvir:` names a version of the language that this kvir does not read.",
        "A later version may give the same words another meaning.",
        "kvir: 7",
        "kvir: 1",
    ),
    "KV102": Code(
        "`keep` is empty",
        "A rule keeps nothing.",
        "The unit would not even keep the token that it is writing, so attention would have nothing to read.",
        "keep: []",
        "keep: [{sink: 4}, {recent: 64}]",
    ),
    "KV103": Code(
        "sinks without a window",
        "A rule keeps the first tokens and nothing else.",
        "Past the sinks, a query could not see even its own token.",
        "keep: [{sink: 4}]",
        "keep: [{sink: 4}, {recent: 64}]",
    ),
    "KV104": Code(
        "a range runs backwards",
        "The first index of a range is larger than the last.",
        "It would select nothing.",
        "layers: 7..3",
        "layers: 3..7",
    ),
    "KV105": Code(
        "the windows table is empty or ragged",
        "The table has no rows, or its rows have different lengths.",
        "It has one row per layer and one window per KV head, and every layer has the same number of KV"
        " heads.",
        "table: [[1024, full], [512]]",
        "table: [[1024, full], [512, full]]",
    ),
    "KV106": Code(
        "`all` beside other terms",
        "A rule keeps every row, and then says which rows it keeps. A warning.",
        "A union with everything is everything; the other terms have no effect.",
        "keep: [all, {recent: 64}]",
        "keep: all",
    ),
    "KV107": Code(
        "the same term twice",
        "A rule has two `sink` or two `recent` terms. A warning.",
        "The union of two is the larger one.",
        "keep: [{recent: 64}, {recent: 128}]",
        "keep: [{recent: 128}]",
    ),
    "KV108": Code(
        "an empty selection",
        "`layers` or `heads` is an empty list.",
        "The rule can never apply.",
        "- {layers: [], keep: all}",
        "- keep: all",
    ),
    "KV109": Code(
        "too many rules",
        "The policy has more rules than the limit in the message.",
        "Every rule is matched against every unit; a budget for each head belongs into the windows table.",
        "rules: [...]      # one rule per layer and head",
        "windows: {table: [...]}",
    ),
    "KV110": Code(
        "floor above cap",
        "A selecting term must keep at least more rows than it may keep at most.",
        "No number of rows fits.",
        "top_p: {mass: 0.9, by: attention, floor: 512, cap: 64}",
        "top_p: {mass: 0.9, by: attention, floor: 64, cap: 512}",
    ),
    "KV111": Code(
        "a trigger that never fires",
        "A rule for one phase selects by score, but is triggered only in the other."
        " Without `trigger:`, a selection runs at `prefill_end`.",
        "The rule would keep everything and save nothing.",
        "- {phase: decode, keep: [{top_k: {tokens: 512, by: key_norm}}]}",
        "- {phase: decode, trigger: {every: 128}, keep: [{top_k: {tokens: 512, by: key_norm}}]}",
    ),
    "KV112": Code(
        "bounds without competition",
        "`floor`, `cap` or `safeguard` stands in a term with `scope: head`. A warning.",
        "They bound what a unit can win or lose to others; alone, each unit has exactly its budget.",
        "top_k: {tokens: 512, by: key_norm, floor: 64}",
        "top_k: {tokens: 512, by: key_norm, floor: 64, scope: layer}",
    ),
    "KV113": Code(
        "a field that needs a selection",
        "`trigger`, `overflow` or `region` stands in a rule whose terms go by position alone. A warning.",
        "Windows slide with every token; there is no moment of selection.",
        "- {keep: [{sink: 4}, {recent: 64}], trigger: {every: 128}}",
        "- keep: [{sink: 4}, {recent: 64}]",
    ),
    "KV114": Code(
        "tied units that compete",
        "`tie` makes units keep the same rows, and `scope` makes the same units compete for rows.",
        "Units with the same rows have nothing to compete for.",
        "top_k: {tokens: 512, by: last_query, tie: layer, scope: layer}",
        "top_k: {tokens: 512, by: last_query, tie: layer}",
    ),
    "KV115": Code(
        "the budget table is empty or ragged",
        "`per_layer` has no figure, or the rows of `per_head` differ in length.",
        "The table has one row per layer, with one figure per KV head.",
        "per_head: [[512, 64], [full]]",
        "per_head: [[512, 64], [full, full]]",
    ),
    "KV116": Code(
        "even pool width",
        "Scores are pooled over an even number of neighbours.",
        "There would be one score more or less than rows, and no row in the middle.",
        "pool: {average: 6}",
        "pool: {average: 7}",
    ),
    "KV117": Code(
        "two selections that count each other",
        "A term with `counts: kept` stands beside another term that selects by score.",
        "Its budget is what the other one leaves, which is known only afterwards.",
        "keep: [{top_k: {tokens: 512, by: key_norm, counts: kept}}, {top_p: {mass: 0.9, by: attention}}]",
        "keep: [{top_k: {tokens: 512, by: key_norm}}, {top_p: {mass: 0.9, by: attention}}]",
    ),
    "KV118": Code(
        "nothing left to select",
        "With `counts: kept` the budget holds the rows of all terms, and the others alone fill it.",
        "The score would never be used.",
        "keep: [{recent: 512}, {top_k: {tokens: 256, by: attention, counts: kept}}]",
        "keep: [{recent: 512}, {top_k: {tokens: 1024, by: attention, counts: kept}}]",
    ),
    "KV119": Code(
        "mass of a score that has none",
        "`top_p` takes its count from a score that is negative by its nature.",
        "Only what is never below zero, like attention, can hold a share of a sum.",
        "top_p: {mass: 0.9, by: rkv}",
        "top_p: {mass: 0.9, by: rkv, of: attention}",
    ),
}
