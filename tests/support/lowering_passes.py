"""Golden blocks of lowering.  A policy names its model in a line `# model: NAME` (see tests/data/configs)."""

from __future__ import annotations

import re

import msgspec

from kvir.lowering import plan_file
from kvir.lowering.model_facts import load_model
from kvir.lowering.pipeline import lower, lower_to
from kvir.lowering.stage_text import stage_text
from kvir.lowering.stages import ExecutionPlan, ModelFacts
from kvir.policy_ir import Parsed, PolicyError, Report, Source, read, render
from support.models import CONFIGS
from support.passes import FILE

_MODEL = re.compile(rb"^# model: (\S+)$", re.MULTILINE)
_DEVICE = re.compile(rb"^# device: (\S+)$", re.MULTILINE)
_PAGE = re.compile(rb"^# page_tokens: (\d+)$", re.MULTILINE)


def resolve(policy: bytes) -> str:
    return _after("resolve", policy)


def budget(policy: bytes) -> str:
    return _after("budget", policy)


def layout(policy: bytes) -> str:
    return _after("layout", policy)


def kernels(policy: bytes) -> str:
    return _after("kernels", policy)


def buckets(policy: bytes) -> str:
    return _after("buckets", policy)


def model(config: bytes) -> str:
    """The facts of a config.json, or why it is refused."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(config)
        try:
            facts = load_model(folder)
        except PolicyError as error:
            return str(error).replace(folder, "MODEL")
    windows = [layer.native_window_tokens for layer in facts.layers]
    first = facts.layers[0]
    return (
        f"{facts.arch}: {len(facts.layers)} of {facts.layer_count} layers, "
        f"{first.query_heads} query heads, {first.kv_heads} KV heads of {first.head_dim}, {facts.dtype}\n"
        f"windows: {', '.join('none' if w is None else str(w) for w in windows)}\n"
    )


def plan(text: bytes) -> str:
    """Reads the text itself as a plan file."""
    return _loaded(text)


def moved(policy: bytes) -> str:
    """Lowers, then loads the plan for another model, dtype and device."""
    other = load_model(CONFIGS / "tiny-gemma3")
    data = plan_file.encode(_plan(policy))
    return _loaded(data, model=other) + _loaded(data, dtype="bfloat16") + _loaded(data, device="cuda")


def edited(policy: bytes) -> str:
    """Lowers, doubles the window of one unit in the plan, and loads it."""
    data = plan_file.encode(_plan(policy))
    assert data.count(b'"recent_tokens": 64') > 1
    return _loaded(data.replace(b'"recent_tokens": 64', b'"recent_tokens": 128', 1))


def _after(name: str, policy: bytes) -> str:
    """The stage that a pass returns, with the warnings before it; or the errors."""
    parsed = read(policy, FILE)
    if parsed.policy is None:
        return render.full(parsed.report)
    page = _PAGE.search(policy)
    device = _DEVICE.search(policy)
    try:
        stage = lower_to(
            name,
            parsed.policy,
            _model(policy),
            dtype="float32",
            device=device[1].decode() if device else "cpu",
            page_tokens=int(page[1]) if page else 16,
            report=parsed.report,
        )
    except PolicyError as error:
        return str(error)
    return render.full(parsed.report) + stage_text(stage)


def _plan(policy: bytes) -> ExecutionPlan:
    parsed: Parsed = read(policy, FILE)
    assert parsed.policy is not None
    return lower(parsed.policy, _model(policy), dtype="float32")


def _model(policy: bytes) -> ModelFacts:
    named = _MODEL.search(policy)
    return load_model(CONFIGS / (named[1].decode() if named else "tiny-llama"))


def _loaded(data: bytes, **wanted: object) -> str:
    try:
        loaded = plan_file.decode(data, Report(Source("plan.json", "")), **wanted)  # type: ignore[arg-type]
    except PolicyError as error:
        return str(error)
    return f"sound: {len(msgspec.json.encode(loaded)) > 0}\n"
