"""Single methods at one share of the rows, everywhere alike: what mixed plans are compared with."""

from __future__ import annotations

from kvir.calibration.polykv.methods import find
from kvir.calibration.polykv.policy import single
from kvir.lowering.stages import ModelFacts
from kvir.policy_ir import Policy, parse

SINKS, RECENT = 4, 32  # inside every budget
METHODS = (
    *("streaming", "snapkv", "h2o", "tova", "keydiff", "knorm", "expected_attention", "lagkv"),
    *("adakv", "criticalkv", "cur", "rkv", "laprox"),
)
FULL = "full"

_TEXT = """\
kvir: 1
name: {name}
rules:
  - keep: [{{sink: {sinks}}}, {{recent: {recent}}}, {{top_k: {{{budget}, counts: kept{more}}}}}]
    trigger: prefill_end
"""
# rivals of all layers, or a budget that depends on the layer: no method of one layer
_ACROSS = {
    "laprox_model": ("fraction: {share}", ", by: laprox, scope: model"),
    "pyramidkv": (
        "ramp: {{mean: {rows}, arithmetic: real, rounding: nearest}}",
        ", by: {attention: {pool: {average: 7}}}",
    ),
}


def names() -> tuple[str, ...]:
    return (*METHODS, *_ACROSS)


def contender(name: str, facts: ModelFacts, rows: int, prompt_tokens: int) -> Policy:
    """The policy that keeps `rows` of a prompt of `prompt_tokens` in every unit, or on average."""
    if name in _ACROSS:
        budget, more = _ACROSS[name]
        given = budget.format(share=round(rows / prompt_tokens, 4), rows=rows)
        text = _TEXT.format(name=name.replace("_", "-"), sinks=SINKS, recent=RECENT, budget=given, more=more)
        return parse(text)
    (method,) = find((name,), sink_tokens=SINKS, recent_tokens=RECENT, per_head=False)
    return single(method, facts, rows, prompt_tokens)
