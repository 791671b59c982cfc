"""VerifiedPolicy x ModelFacts -> BoundPolicy: which rule governs which unit (KV2xx).

`layers` in a policy counts every layer of the model, with or without a KV cache, as model configs do.  The
windows table has one row per layer that has a KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvir.lowering.places import NOTHING, WINDOWS, place, rule_place
from kvir.lowering.stages import BoundPolicy, ModelFacts, VerifiedPolicy
from kvir.policy_ir.budgets import PerHead, PerLayer
from kvir.policy_ir.diagnostic import Diagnostic, Report
from kvir.policy_ir.nodes import PHASES, IndexSet, Phase, Policy, Rule, TopK, Windows
from kvir.policy_ir.source import Source

Governing = tuple[tuple[int, ...], ...]  # [layer_index][kv_head]


@dataclass(frozen=True)
class Resolve:
    name: ClassVar[str] = "resolve"
    model: ModelFacts
    report: Report

    def __call__(self, verified: VerifiedPolicy) -> BoundPolicy:
        policy = verified.policy
        self._pin(policy)
        if policy.windows is not None:
            self._table(policy.windows)
        kv_heads = max(layer.kv_heads for layer in self.model.layers)
        for i, rule in enumerate(policy.rules):
            self._range(rule.layers, self.model.layer_count, "layer", f"$.rules[{i}].layers")
            self._range(rule.heads, kv_heads, "KV head", f"$.rules[{i}].heads")
            for j, term in enumerate(rule.keep):
                if isinstance(term, TopK):
                    self._budget(term, f"$.rules[{i}].keep[{j}].budget")
        prefill, decode = (governing(policy, self.model, phase) for phase in PHASES)
        if not self.report.error_count:
            self._unused(policy, {r for table in (prefill, decode) for row in table for r in row})
        return BoundPolicy(verified=verified, model=self.model, prefill_rule=prefill, decode_rule=decode)

    def _pin(self, policy: Policy) -> None:
        model, pin = self.model, policy.model
        if pin is not None:
            kv_heads = sorted({layer.kv_heads for layer in model.layers})
            wanted = (
                ("arch", pin.arch, (model.arch, model.architecture)),
                ("layers", pin.layers, (model.layer_count,)),
                ("kv_heads", pin.kv_heads, tuple(kv_heads)),
                ("fingerprint", pin.fingerprint, (model.fingerprint,)),
            )
            for field, want, have in wanted:
                if want is not None and want not in have:
                    self.report.error(
                        "KV205",
                        f"the policy is for a model with {field} {want}, "
                        f"this one has {' or '.join(map(str, have))}",
                        place(self.report, f"$.model.{field}"),
                        help="serve the model the policy was written for, or change `model`",
                    )
        calibrated = policy.provenance.model if policy.provenance is not None else None
        if calibrated is not None and calibrated != model.fingerprint:
            self.report.error(
                "KV206",
                f"the policy was calibrated for another model (fingerprint {calibrated[:12]}..., "
                f"this model {model.fingerprint[:12]}...)",
                place(self.report, "$.provenance.model"),
                help="calibrate it again for this model",
            )

    def _table(self, windows: Windows) -> None:
        rows, layers = len(windows.table), len(self.model.layers)
        if rows != layers:
            self.report.error(
                "KV207",
                f"the windows table has {rows} rows, the model has {layers} layers with a KV cache",
                place(self.report, "$.windows.table"),
                help="the table needs one row per layer; was it calibrated for another model?",
            )
            return
        widths = {len(row) for row in windows.table}
        kv_heads = self.model.layers[0].kv_heads
        if len(widths) == 1 and widths != {kv_heads}:  # a ragged table is reported by `verify`
            self.report.error(
                "KV207",
                f"the windows table has {widths.pop()} windows per layer, the model has {kv_heads} KV heads",
                place(self.report, "$.windows.table[0]"),
                help="each row needs one window per KV head; was it calibrated for another model?",
            )

    def _budget(self, term: TopK, path: str) -> None:
        match term.budget:
            case PerLayer(tokens=rows):
                heads = None
            case PerHead(table=rows):
                # rows of different length, or none, are reported by `verify`
                heads = len(rows[0]) if rows and len({len(row) for row in rows}) == 1 else None
            case _:
                return
        layers, kv_heads = len(self.model.layers), {layer.kv_heads for layer in self.model.layers}
        if rows and len(rows) != layers:
            self.report.error(
                "KV209",
                f"the budget table has {len(rows)} rows, the model has {layers} layers with a KV cache",
                place(self.report, path),
                help="the table needs one row per layer; was it made for another model?",
            )
        elif heads and heads not in kv_heads:
            self.report.error(
                "KV209",
                f"the budget table has {heads} figures per layer, the model has {max(kv_heads)} KV heads",
                place(self.report, path),
                help="each row needs one figure per KV head; was it made for another model?",
            )

    def _range(self, indices: IndexSet | None, count: int, word: str, path: str) -> None:
        for i, r in enumerate(indices or ()):
            if max(r.first, r.last) >= count:
                self.report.error(
                    "KV204" if word == "layer" else "KV203",
                    f"{word} {max(r.first, r.last)} does not exist: the model has {count} {word}s",
                    place(self.report, f"{path}[{i}]"),
                    help=f"{word}s are numbered 0..{count - 1}",
                )

    def _unused(self, policy: Policy, used: set[int]) -> None:
        candidates = range(WINDOWS if policy.windows is not None else 0, len(policy.rules))
        for i in candidates:
            if i in used:
                continue
            covered = None if i == WINDOWS else _selected(policy.rules[i], self.model)
            selects = covered is None or next(covered, None) is not None
            self.report.warning(
                "KV208",
                "every unit this covers is governed by later rules, so it has no effect"
                if selects
                else "the rule covers no layer with a KV cache, so it has no effect",
                rule_place(self.report, i),
                help="later rules override earlier ones: put the general rule first, or delete this one",
            )


def bound_errors(verified: VerifiedPolicy, model: ModelFacts) -> list[str]:
    """The errors that `Resolve` would report, as one line each."""
    report = Report(Source(verified.policy.name, ""))
    Resolve(model, report)(verified)
    found: list[Diagnostic] = [d for d in report if d.severity == "error"]
    return [d.message for d in found]


def governing(policy: Policy, model: ModelFacts, phase: Phase) -> Governing:
    """The index of the rule that governs each unit in `phase`: the last one that covers it."""
    fits = policy.windows is not None and [len(row) for row in policy.windows.table] == [
        layer.kv_heads for layer in model.layers
    ]
    table = [[WINDOWS if fits else NOTHING] * layer.kv_heads for layer in model.layers]
    for i, rule in enumerate(policy.rules):
        if rule.phase is None or rule.phase == phase:
            for layer, head in _selected(rule, model):
                table[layer][head] = i
    return tuple(tuple(row) for row in table)


def _selected(rule: Rule, model: ModelFacts) -> Iterator[tuple[int, int]]:
    """(layer_index, KV head) of every unit that a rule covers; what lies outside the model is skipped."""
    for index, layer in enumerate(model.layers):
        if _covers(rule.layers, layer.layer_id):
            for head in range(layer.kv_heads):
                if _covers(rule.heads, head):
                    yield index, head


def _covers(indices: IndexSet | None, index: int) -> bool:
    return indices is None or any(r.first <= index <= r.last for r in indices)
