"""What was chosen -> rules of the language, and the text of an `.ir` file."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from kvir import __version__
from kvir.calibration.polykv.methods import Method
from kvir.calibration.polykv.result import PolyCalibration, UnitChoice
from kvir.lowering.stages import ModelFacts
from kvir.policy_ir import Policy, print_policy
from kvir.policy_ir.nodes import IndexRange, IndexSet, ModelPin, Provenance, Rule

TOOL = "kvir calibrate polykv"


def plan_rules(
    methods: Sequence[Method],
    layers: Sequence[int],
    choices: Sequence[Sequence[UnitChoice]],
    context_tokens: int,
    *,
    per_head: bool,
) -> tuple[Rule, ...]:
    """A rule for each distinct choice of a layer; units that keep everything need none."""
    rules: list[Rule] = []
    for layer_id, row in zip(layers, choices, strict=True):
        for choice in dict.fromkeys(row):
            if choice.rows >= context_tokens:
                continue
            rule = methods[choice.method].rule(choice.rows, context_tokens)
            heads = [head for head, other in enumerate(row) if other == choice]
            rules.append(
                structs.replace(
                    rule,
                    layers=(IndexRange(first=layer_id, last=layer_id),),
                    heads=_runs(heads) if per_head and len(heads) < len(row) else None,
                )
            )
    return tuple(rules)


def single(method: Method, facts: ModelFacts, rows: int, context_tokens: int) -> Policy:
    """One method everywhere; layers with a window of the model's own keep that."""
    layers = [layer.layer_id for layer in facts.layers if layer.native_window_tokens is None]
    rule = structs.replace(method.rule(rows, context_tokens), layers=_runs(layers))
    return Policy(kvir=1, name=method.name.replace("_", "-"), rules=(rule,))


def policy(facts: ModelFacts, rules: tuple[Rule, ...], name: str, found: PolyCalibration) -> Policy:
    """The plan, bound to its model."""
    inputs = found.inputs
    return Policy(
        kvir=1,
        name=name,
        model=ModelPin(arch=facts.arch, layers=facts.layer_count),
        rules=rules,
        provenance=Provenance(
            tool=TOOL,
            version=__version__,
            model=facts.fingerprint,
            data=f"{inputs.data}; {inputs.samples} texts and {inputs.retrieval_samples} retrieval samples; "
            f"weights {inputs.weights[:16]}; grain {inputs.grain}; budget {inputs.budget:g}",
            context=inputs.context_tokens,
            samples=inputs.samples + inputs.retrieval_samples,
        ),
    )


def policy_text(plan: Policy, header: Sequence[str]) -> str:
    """Canonical text after a comment."""
    return "".join(f"# {line}\n" for line in header) + print_policy(plan)


def _runs(indices: Sequence[int]) -> IndexSet:
    """Ascending indices as ranges."""
    runs: list[IndexRange] = []
    for index in indices:
        if runs and runs[-1].last == index - 1:
            runs[-1] = IndexRange(first=runs[-1].first, last=index)
        else:
            runs.append(IndexRange(first=index, last=index))
    return tuple(runs)
