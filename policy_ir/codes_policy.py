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
}
