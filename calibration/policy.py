"""A finished calibration -> the text of an `.ir` file."""

from __future__ import annotations

from collections.abc import Sequence

from kvir import __version__
from kvir.calibration.candidates import FULL, Candidate
from kvir.calibration.result import Calibration
from kvir.lowering.stages import ModelFacts
from kvir.policy_ir import PolicyBuilder, print_policy, recent, sink

TOOL = "kvir calibrate seqcalib"


def policy_text(facts: ModelFacts, calibration: Calibration, name: str, header: Sequence[str]) -> str:
    """Canonical text after a comment.  Layers with a native window keep what the model gives them.

    A windows table where all heads have as many sinks and all layers as many heads, else a rule per head."""
    kept = dict(zip(calibration.layers, calibration.best.choices, strict=True))
    codes = calibration.codes
    table = [
        [codes[k] for k in kept[layer.layer_id]] if layer.layer_id in kept else [FULL] * layer.kv_heads
        for layer in facts.layers
    ]
    sinks = {c.sink_tokens for row in table for c in row if c.recent_tokens is not None}
    widths = {len(row) for row in table}
    builder = PolicyBuilder(name)
    if len(sinks) <= 1 and len(widths) == 1:
        (kv_heads,) = widths
        builder.model(arch=facts.arch, layers=facts.layer_count, kv_heads=kv_heads)
        builder.windows([[c.recent_tokens for c in row] for row in table], sink=max(sinks, default=0))
    else:
        builder.model(arch=facts.arch, layers=facts.layer_count)
        for layer, row in zip(facts.layers, table, strict=True):
            _rules(builder, layer.layer_id, row)
    if calibration.inputs.phase == "decode":
        builder.rule("all", phase="prefill")
    inputs, best = calibration.inputs, calibration.best
    builder.provenance(
        TOOL,
        __version__,
        model=facts.fingerprint,
        data=_data(calibration),
        context=inputs.context_tokens,
        samples=inputs.samples + inputs.retrieval_samples,
        threshold=best.tau,
    )
    comment = "".join(f"# {line}\n" for line in header)
    return comment + print_policy(builder.build())


def _rules(builder: PolicyBuilder, layer_id: int, row: Sequence[Candidate]) -> None:
    for candidate in dict.fromkeys(c for c in row if c.recent_tokens is not None):
        assert candidate.recent_tokens is not None
        terms = [recent(candidate.recent_tokens)]
        if candidate.sink_tokens:
            terms = [sink(candidate.sink_tokens), *terms]
        heads = [head for head, c in enumerate(row) if c == candidate]
        builder.rule(terms, layers=layer_id, heads=heads)


def _data(calibration: Calibration) -> str:
    inputs = calibration.inputs
    parts = [
        inputs.data,
        f"{inputs.samples} texts and {inputs.retrieval_samples} retrieval samples",
        f"weights {inputs.weights[:16]}",
        f"objective {inputs.objective}",
    ]
    if inputs.budget is not None:
        parts.append(f"budget {inputs.budget:g}")
    return "; ".join(parts)
