"""Policy -> VerifiedPolicy: rules that need only the policy (KV1xx)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvir.lowering.places import place
from kvir.lowering.stages import VerifiedPolicy
from kvir.policy_ir.checks import check as check_selections
from kvir.policy_ir.diagnostic import Diagnostic, Report
from kvir.policy_ir.nodes import LANGUAGE_VERSION, All, IndexSet, Policy, Recent, Rule, Sink, Windows
from kvir.policy_ir.source import Source

MAX_RULES = 4096


@dataclass(frozen=True)
class Verify:
    name: ClassVar[str] = "verify"
    report: Report

    def __call__(self, policy: Policy) -> VerifiedPolicy:
        if policy.kvir != LANGUAGE_VERSION:
            self.report.error(
                "KV101",
                f"this kvir reads language version {LANGUAGE_VERSION}, not {policy.kvir}",
                place(self.report, "$.kvir"),
                help=f"write `kvir: {LANGUAGE_VERSION}`, or use a kvir that knows version {policy.kvir}",
            )
        if len(policy.rules) > MAX_RULES:
            self.report.error(
                "KV109",
                f"the policy has {len(policy.rules)} rules; the limit is {MAX_RULES}",
                place(self.report, "$.rules"),
                help="use the windows table for budgets per head",
            )
        if policy.windows is not None:
            self._windows(policy.windows)
        for i, rule in enumerate(policy.rules):
            self._keep(rule, f"$.rules[{i}].keep")
            self._indices(rule.layers, f"$.rules[{i}].layers")
            self._indices(rule.heads, f"$.rules[{i}].heads")
        check_selections(policy, self.report)
        return VerifiedPolicy(policy=policy)

    def _windows(self, windows: Windows) -> None:
        widths = [len(row) for row in windows.table]
        if not widths or not widths[0]:
            self.report.error(
                "KV105",
                "the windows table is empty",
                place(self.report, "$.windows.table"),
                help="give one row per layer, with one window per KV head in it; or leave `windows` out",
            )
            return
        for i, width in enumerate(widths):
            if width != widths[0]:
                self.report.error(
                    "KV105",
                    f"row {i} of the windows table has {width} windows, row 0 has {widths[0]}",
                    place(self.report, f"$.windows.table[{i}]"),
                    help="give every layer one window per KV head; `full` for a head that keeps everything",
                )

    def _keep(self, rule: Rule, path: str) -> None:
        terms = rule.keep
        if not terms:
            self.report.error(
                "KV102",
                "`keep` is empty: the unit would not even keep the token that it is writing",
                place(self.report, path),
                help="keep something, at least `recent: 1`",
            )
            return
        everything = [i for i, t in enumerate(terms) if isinstance(t, All)]
        if everything:
            if len(terms) > 1:
                self.report.warning(
                    "KV106",
                    "`all` keeps every row, so the other terms have no effect",
                    place(self.report, f"{path}[{everything[0]}]"),
                    help="write `keep: all`, or drop the `all`",
                )
            return
        only_static = all(isinstance(t, (Sink, Recent)) for t in terms)
        if only_static and not any(isinstance(t, Recent) for t in terms):
            self.report.error(
                "KV103",
                "`sink` without `recent`: past the sinks, a query could not see even its own token",
                place(self.report, path),
                help="add `recent: n`; `recent: 1` keeps only the query's own token",
            )
        for kind, word in ((Sink, "sink"), (Recent, "recent")):
            same = [i for i, t in enumerate(terms) if isinstance(t, kind)]
            if len(same) > 1:
                self.report.warning(
                    "KV107",
                    f"`{word}` is given {len(same)} times; the largest counts",
                    place(self.report, f"{path}[{same[1]}]"),
                    help=f"keep one `{word}`",
                )

    def _indices(self, indices: IndexSet | None, path: str) -> None:
        if indices is None:
            return
        if not indices:
            self.report.error(
                "KV108",
                "the selection is empty, so the rule can never apply",
                place(self.report, path),
                help="leave the field out to select everything",
            )
        for i, r in enumerate(indices):
            if r.first > r.last:
                self.report.error(
                    "KV104",
                    f"the range {r.first}..{r.last} runs backwards",
                    place(self.report, f"{path}[{i}]"),
                    help=f"write {r.last}..{r.first}; both ends are included",
                )


def verified_errors(policy: Policy) -> list[str]:
    """The errors that `Verify` would report, as one line each."""
    report = Report(Source(policy.name, ""))
    Verify(report)(policy)
    found: list[Diagnostic] = [d for d in report if d.severity == "error"]
    return [d.message for d in found]
