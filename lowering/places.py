"""Places and names for findings: where in a policy's text something stands, and how units are named to
people.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvir.policy_ir.diagnostic import Report
from kvir.policy_ir.source import Span

WINDOWS, NOTHING = -1, -2  # governing "rules" of `BoundPolicy` that are not in `policy.rules`


def place(report: Report, path: str) -> Span | None:
    """The span of a field path; None for a policy that was built in Python and has no text."""
    return None if report.source.root is None else report.source.span(path)


def rule_place(report: Report, rule: int) -> Span | None:
    """The span of the rule, or windows table, that governs a unit."""
    if rule == NOTHING:
        return None
    return place(report, "$.windows" if rule == WINDOWS else f"$.rules[{rule}]")


def rule_name(rule: int) -> str:
    match rule:
        case -2:
            return "no rule (which means `all`)"
        case -1:
            return "the windows table"
        case n:
            return f"rules[{n}]"


def ranges(indices: Iterable[int]) -> str:
    """Ascending indices as the language writes them: `0..3, 7`."""
    runs: list[list[int]] = []
    for i in indices:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in runs)
