"""The example policies, and a model that each of them lowers for."""

from __future__ import annotations

from pathlib import Path

from kvir.lowering.stages import ModelFacts
from support.models import config_model, made

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").rglob("*.ir"))

# those that are pinned to a shape, or were calibrated for one model; all others lower for Llama 3.1 8B
MODELS = {
    "headkv": "smollm2-135m",
    "headwise_gemma3": "gemma-3-270m",
    "headwise_smollm2": "smollm2-135m",
    "headwise_smollm2_quarter": "smollm2-135m",
    "layer_ramp": "smollm2-135m",
    "retrieval_heads": "smollm2-135m",
}


def model_of(path: Path | None) -> ModelFacts:
    """The model of an example; without one, the tiny Llama."""
    if path is None:
        return config_model("tiny-llama")
    if path.stem == "headwisekv":  # four layers that stand for a calibrated table
        return made(4, 2, head_dim=64)
    default = "smollm2-135m" if "smollm2" in path.name else "llama-3.1-8b"
    return config_model(MODELS.get(path.stem, default))
