"""`config.json` of a model folder -> `ModelFacts`.  Reads JSON only; no torch, no transformers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec

from kvir.lowering import families
from kvir.lowering.config_reader import Config, Refused
from kvir.lowering.families import Family
from kvir.lowering.model_layers import MAX_LAYERS, attention_needs, read_layers
from kvir.lowering.stages import DTYPE_BYTES, AttentionLayer, Dtype, ModelFacts
from kvir.policy_ir.describe import closest
from kvir.policy_ir.diagnostic import PolicyError, Report
from kvir.policy_ir.nodes import MAX_TOKENS
from kvir.policy_ir.source import Source

MAX_HEADS = 1024
MAX_HEAD_DIM = 4096
MAX_UNITS = 1 << 16


def facts_of(config: Config) -> ModelFacts:
    """The facts of one parsed `config.json`.  Raises `Refused`."""
    text, arch = _text_config(config)
    family = _family(arch, text)
    layers, layer_count, context_tokens = read_layers(text, family, arch)
    model = ModelFacts(
        arch=arch,
        architecture=_architecture(config),
        layers=layers,
        layer_count=layer_count,
        context_tokens=context_tokens,
        dtype=_dtype(config, text),
        needs=attention_needs(text, family, layers),
        fingerprint=fingerprint(arch, layer_count, layers),
    )
    for error in facts_errors(model):
        raise Refused("KV202", f"`{arch}`: {error}", "check config.json")
    return model


def fingerprint(arch: str, layer_count: int, layers: tuple[AttentionLayer, ...]) -> str:
    """SHA-256 over what fixes a policy's meaning: not the dtype, not the weights, not the context length."""
    return hashlib.sha256(msgspec.json.encode([arch, layer_count, layers])).hexdigest()


def facts_errors(model: ModelFacts) -> Iterator[str]:
    """What is true of every model that lowering takes."""
    ids = [layer.layer_id for layer in model.layers]
    if not 1 <= len(ids) <= model.layer_count <= MAX_LAYERS:
        yield f"a model has 1..{MAX_LAYERS} layers, and at least one with a KV cache"
    if ids != sorted(set(ids)) or (ids and not 0 <= ids[0] <= ids[-1] < model.layer_count):
        yield "layer ids ascend and lie inside the model"
    for layer in model.layers:
        sane = 1 <= layer.kv_heads <= MAX_HEADS and 1 <= layer.head_dim <= MAX_HEAD_DIM
        if not sane or layer.query_heads < 1 or layer.query_heads % layer.kv_heads:
            yield f"layer {layer.layer_id}: heads or head size out of range"
        if layer.native_window_tokens is not None and not 1 <= layer.native_window_tokens <= MAX_TOKENS:
            yield f"layer {layer.layer_id}: native window out of range"
    if sum(layer.kv_heads for layer in model.layers) > MAX_UNITS:
        yield f"more than {MAX_UNITS} units"
    if not 1 <= model.context_tokens <= MAX_TOKENS:
        yield "context length out of range"
    if model.fingerprint != fingerprint(model.arch, model.layer_count, model.layers):
        yield "the model fingerprint is not that of its layers"


# ---- parts -------------------------------------------------------------------------------------------------


def _text_config(config: Config) -> tuple[Config, str]:
    """The config of the language model and its `model_type`, from under `text_config` where it is nested."""
    outer = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder"):
        raise Refused(
            "KV202",
            f"`{outer}` is an encoder-decoder model; kvir plans decoder-only models",
            "give the folder of a decoder-only model",
        )
    nested = config.get("text_config")
    if not isinstance(nested, dict):
        return config, families.NESTED.get(outer, outer)
    text = cast(Config, nested)
    return text, str(text.get("model_type") or families.NESTED.get(outer, outer))


def _family(arch: str, text: Config) -> Family:
    reason = families.REFUSED.get(arch)
    if reason is None and text.get("kv_lora_rank"):
        reason = families.REFUSED["deepseek_v3"]
    if reason is None and text.get("num_kv_shared_layers"):
        reason = families.REFUSED["gemma3n_text"]
    if reason is not None:
        raise Refused("KV202", f"`{arch}` is not supported: {reason}", "serve it without `--kv-ir`")
    if text.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise Refused(
            "KV202", f"this `{arch}` attends in both directions", "only causal models have a KV cache to plan"
        )
    if arch not in families.FAMILIES:
        near = closest(arch, families.FAMILIES)
        raise Refused(
            "KV201",
            f"unknown model family `{arch}`" + (f"; did you mean `{near}`?" if near else ""),
            f"known families: {', '.join(sorted(families.FAMILIES))}",
        )
    return families.FAMILIES[arch]


def _architecture(config: Config) -> str:
    names: object = config.get("architectures")
    return str(cast(list[object], names)[0]) if isinstance(names, list) and names else ""


def _dtype(config: Config, text: Config) -> Dtype:
    """The dtype that the model computes in.  Without one, weights are float32, unless they are quantised; a
    dtype that nothing computes in (a quantised checkpoint's) stands for bfloat16."""
    named = (c.get(k) for c in (text, config) for k in ("dtype", "torch_dtype"))
    value = next((str(d) for d in named if d), "bfloat16" if "quantization_config" in config else "float32")
    return value if value in DTYPE_BYTES else "bfloat16"


# ---- files -------------------------------------------------------------------------------------------------


def load_model(folder: str | os.PathLike[str]) -> ModelFacts:
    """The facts of the model in `folder` (or of a `config.json` given by name).

    Raises:
        PolicyError: the config cannot be read, or describes a model that lowering cannot plan for.
    """
    path = Path(folder)
    if path.suffix != ".json" or path.is_dir():
        path = path / "config.json"
    report = Report(Source(str(path), ""))
    try:
        config: object = msgspec.json.decode(path.read_bytes())
        if not isinstance(config, dict):
            raise Refused(
                "KV200", "the config is not a JSON object", "give the folder of a Hugging Face model"
            )
        return facts_of(cast(Config, config))
    except OSError as error:
        report.error(
            "KV200",
            f"the model config cannot be read: {error.strerror}",
            None,
            help="give the folder that holds the model's config.json",
        )
    except msgspec.DecodeError as error:
        report.error("KV200", f"the model config is not JSON: {error}", None, help="download the model again")
    except Refused as refused:
        report.error(refused.code, refused.message, None, help=refused.help)
    raise PolicyError(report)
