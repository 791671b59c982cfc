"""Model facts for tests: from the configs in tests/data, or made to measure.  No downloads."""

from __future__ import annotations

from pathlib import Path

from kvir.lowering.model_facts import fingerprint, load_model
from kvir.lowering.stages import AttentionLayer, ModelFacts

CONFIGS = Path(__file__).parents[1] / "data/configs"


def config_model(name: str) -> ModelFacts:
    """The model of tests/data/configs/NAME."""
    return load_model(CONFIGS / name)


def made(
    layers: int, kv_heads: int, *, group: int = 1, head_dim: int = 8, windows: tuple[int | None, ...] = ()
) -> ModelFacts:
    """A llama of any shape; `windows` gives the first layers native windows."""
    attention = tuple(
        AttentionLayer(
            layer_id=i,
            query_heads=kv_heads * group,
            kv_heads=kv_heads,
            head_dim=head_dim,
            native_window_tokens=windows[i] if i < len(windows) else None,
        )
        for i in range(layers)
    )
    return ModelFacts(
        arch="llama",
        architecture="LlamaForCausalLM",
        layers=attention,
        layer_count=layers,
        context_tokens=1 << 17,
        dtype="bfloat16",
        fingerprint=fingerprint("llama", layers, attention),
    )
