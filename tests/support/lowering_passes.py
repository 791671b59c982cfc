"""Golden blocks of lowering.  A policy names its model in a line `# model: NAME` (see tests/data/configs)."""

from __future__ import annotations

import re

import msgspec

from kvir import __version__
from kvir.lowering import footprint, plan_file, stage_file
from kvir.lowering.model_facts import load_model
from kvir.lowering.pipeline import lower, lower_to
from kvir.lowering.spec import AnyStage
from kvir.lowering.stage_text import stage_text
from kvir.lowering.stages import ExecutionPlan, LayoutPlan, ModelFacts
from kvir.lowering.unsupported import refuse, unsupported_by_runtime
from kvir.policy_ir import Parsed, PolicyError, Report, Source, read, render
from support.models import CONFIGS
from support.passes import FILE

_MODEL = re.compile(rb"^# model: (\S+)$", re.MULTILINE)
_DEVICE = re.compile(rb"^# device: (\S+)$", re.MULTILINE)
_DTYPE = re.compile(rb"^# dtype: (\S+)$", re.MULTILINE)
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


def cost(policy: bytes) -> str:
    """What requests of some lengths hold: at their peak, and when their selections are done."""
    layout = _lowered("layout", policy)
    if not isinstance(layout, LayoutPlan):
        return str(layout)
    lines: list[str] = []
    for n in (100, 1000, 1001, 8000):
        peak = footprint.peak_pages(layout, n)
        held = [footprint.done_pages(layout, n + new, n) for new in (0, 100, 1000)]
        words = (str(b.most) if b.exact else f"{b.least}..{b.most}" for b in held)
        full = footprint.full_pages(layout, n)
        lines.append(
            f"{n}: peak {peak} of {full}; done {next(words)}, "
            f"100 later {next(words)}, 1000 later {next(words)}"
        )
    return "\n".join(lines)


def serve(policy: bytes) -> str:
    """What a server of this version refuses of a policy that lowers."""
    parsed = read(policy, FILE)
    assert parsed.policy is not None
    stage = _lowered("plan", policy)
    if not isinstance(stage, ExecutionPlan):
        return str(stage)
    refuse(unsupported_by_runtime(stage), parsed.report)
    return render.full(parsed.report) or "none"


def stage(text: bytes) -> str:
    """Reads the text itself as a file that holds a stage, with VERSION for that of kvir."""
    text = text.replace(b"VERSION", __version__.encode())
    try:
        return stage_text(stage_file.decode(text, Report(Source("stage.json", ""))))
    except PolicyError as error:
        return str(error)


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
    found = _lowered(name, policy, parsed.report)
    return str(found) if isinstance(found, PolicyError) else render.full(parsed.report) + stage_text(found)


def _lowered(name: str, policy: bytes, report: Report | None = None) -> AnyStage | PolicyError:
    """The stage that a pass returns, or why there is none."""
    parsed = read(policy, FILE)
    assert parsed.policy is not None
    dtype = _DTYPE.search(policy)
    page = _PAGE.search(policy)
    device = _DEVICE.search(policy)
    try:
        return lower_to(
            name,
            parsed.policy,
            _model(policy),
            dtype=dtype[1].decode() if dtype else "float32",  # type: ignore[arg-type]
            device=device[1].decode() if device else "cpu",
            page_tokens=int(page[1]) if page else 16,
            report=parsed.report if report is None else report,
        )
    except PolicyError as error:
        return error


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
