"""`config.json` of a model folder -> `ModelFacts`: which layers cache what.  Reads JSON only; no torch, no
transformers.

`native_window_tokens` counts the query's own row, as transformers does: its mask keeps `kv > q -
sliding_window` (`masking_utils.sliding_window_overlay`), so `sliding_window` rows with the query's own.
SGLang's `sliding_window_size` counts the earlier rows only and is one less.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec

from kvir.lowering import families
from kvir.lowering.families import Family
from kvir.lowering.stages import DTYPE_BYTES, AttentionLayer, Dtype, ModelFacts
from kvir.policy_ir.describe import closest
from kvir.policy_ir.diagnostic import PolicyError, Report
from kvir.policy_ir.nodes import MAX_TOKENS
from kvir.policy_ir.source import Source

Config = dict[str, Any]

MAX_LAYERS = 4096
MAX_HEADS = 1024
MAX_HEAD_DIM = 4096
MAX_UNITS = 1 << 16

_GLOBAL = {"full_attention", "attention"}
_WITHOUT_CACHE = {"linear_attention", "conv", "mamba", "recurrent"}


class Refused(Exception):
    """The config describes something that lowering cannot plan for."""

    def __init__(self, code: str, message: str, help: str) -> None:
        super().__init__(message)
        self.code, self.message, self.help = code, message, help


def facts_of(config: Config) -> ModelFacts:
    """The facts of one parsed `config.json`.  Raises `Refused`."""
    text, arch = _text_config(config)
    family = _family(arch, text)
    read = _Reader(text, family, arch)
    layer_count = read.positive("num_hidden_layers", most=MAX_LAYERS)
    query_heads = read.positive("num_attention_heads")
    kv_heads = read.positive("num_key_value_heads", otherwise=query_heads)
    head_dim = read.positive("head_dim", otherwise=0) or read.positive("hidden_size") // query_heads
    context_tokens = read.positive("max_position_embeddings")
    read.finish()
    if query_heads % kv_heads:
        raise Refused(
            "KV202",
            f"{query_heads} query heads do not divide into {kv_heads} KV heads",
            "check `num_attention_heads` and `num_key_value_heads` in config.json",
        )
    layers = tuple(
        AttentionLayer(
            layer_id=i,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            native_window_tokens=window,
        )
        for i, window in enumerate(_windows(text, family, arch, layer_count))
        if window != 0
    )
    needs = tuple(n for n in family.needs if n != families.LOGIT_CAP or text.get("attn_logit_softcapping", 1))
    model = ModelFacts(
        arch=arch,
        architecture=_architecture(config),
        layers=layers,
        layer_count=layer_count,
        context_tokens=context_tokens,
        dtype=_dtype(config, text),
        needs=needs,
        fingerprint=fingerprint(arch, layer_count, layers),
    )
    for error in facts_errors(model):
        raise Refused("KV202", f"`{arch}`: {error}", "check config.json")
    return model


def fingerprint(arch: str, layer_count: int, layers: tuple[AttentionLayer, ...]) -> str:
    """SHA-256 over what fixes the meaning of a policy: not the dtype, not the weights, not the context
    length.
    """
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


class _Reader:
    """Typed access to the fields of a config, so that all missing ones are named at once."""

    def __init__(self, text: Config, family: Family, arch: str) -> None:
        self.text, self.family, self.arch = text, family, arch
        self.wrong: list[str] = []

    def positive(self, name: str, otherwise: int | None = None, most: int = MAX_TOKENS) -> int:
        """Field `name`; `otherwise` stands for null, and for a missing field whose default is null."""
        defaults = self.family.defaults
        value: object = self.text.get(name, defaults.get(name, self.text))
        if value is self.text:  # neither there nor in the defaults
            value = otherwise if name == "head_dim" else self.text
        if value is None and otherwise is not None:
            return otherwise
        least = 0 if otherwise == 0 else 1
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        self.wrong.append(f"`{name}`" if value is self.text else f"`{name}` ({value!r})")
        return 1

    def finish(self) -> None:
        if self.wrong:
            raise Refused(
                "KV202",
                f"config of `{self.arch}` lacks usable {', '.join(self.wrong)}",
                "each must be a positive integer, not too large",
            )


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
    if text.get("use_bidirectional_attention"):
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


def _windows(text: Config, family: Family, arch: str, layer_count: int) -> list[int | None]:
    """Per layer of the model: its native window, None for a global layer, 0 if it has no KV cache."""
    kinds: object = text.get("layer_types")
    if not isinstance(kinds, list):
        kinds = _layer_types(text, family, layer_count)
    kinds = [str(kind) for kind in cast(list[object], kinds)]
    if len(kinds) != layer_count:
        raise Refused(
            "KV202",
            f"`layer_types` lists {len(kinds)} layers, `num_hidden_layers` says {layer_count}",
            "config.json must agree with itself",
        )
    gate_open = not family.gated or bool(text.get("use_sliding_window"))
    window: object = text.get("sliding_window", family.defaults.get("sliding_window"))
    result: list[int | None] = []
    for kind in kinds:
        if kind in _WITHOUT_CACHE:
            result.append(0)
        elif kind in _GLOBAL or (kind == "sliding_attention" and (window is None or not gate_open)):
            result.append(None)
        elif kind == "sliding_attention" and isinstance(window, int) and window is not True and window > 0:
            result.append(window)
        else:
            raise Refused(
                "KV202",
                f"`{arch}` has a layer of kind `{kind}`, which kvir cannot plan"
                if kind != "sliding_attention"
                else f"`sliding_window` is {window!r}; it must be a positive integer",
                f"known kinds: {', '.join(sorted(_GLOBAL | _WITHOUT_CACHE | {'sliding_attention'}))}",
            )
    return result


def _layer_types(text: Config, family: Family, layer_count: int) -> list[str]:
    """The kinds of layers of a config that does not list them."""

    def every_nth_global(n: int, other: str) -> list[str]:
        return [other if (i + 1) % n else "full_attention" for i in range(layer_count)]

    if family.linear_but is not None:
        return every_nth_global(
            _whole(text, "full_attention_interval", family.linear_but), "linear_attention"
        )
    match family.sliding:
        case "none":
            return ["full_attention"] * layer_count
        case "every":
            return ["sliding_attention"] * layer_count
        case "from_max_window_layers":
            first = _whole(text, "max_window_layers", 28, least=0)
            return ["sliding_attention" if i >= first else "full_attention" for i in range(layer_count)]
        case n:
            return every_nth_global(_whole(text, "sliding_window_pattern", n), "sliding_attention")


def _whole(text: Config, name: str, default: int, least: int = 1) -> int:
    value: object = text.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_TOKENS:
        raise Refused("KV202", f"`{name}` is {value!r}", f"it must be an integer from {least}")
    return value


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
