"""The model families that lowering knows, as data: where their configs say which layers slide, and what they
leave out.

Keys are the `model_type` of the (text) config.  Defaults stand for fields that published configs of the
family omit because they equal the class defaults in transformers (`configuration_<family>.py`).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

# Features of attention that a kernel must have to run a model; see kernels/catalog.py.
LOGIT_CAP = "logit_cap"  # cap * tanh(logit / cap), Gemma 2
LEARNED_SINKS = "learned_sinks"  # one trained logit per head in the softmax's denominator, gpt-oss
CHUNKED = "chunked_attention"  # a query sees its own chunk only, Llama 4

Defaults = dict[str, int | None]


class Family(Struct, frozen=True, kw_only=True):
    """How a family's config is read.

    sliding: which layers have the native window, unless the config lists `layer_types`: none, every layer,
        those from `max_window_layers` on, or all but each n-th (the config's `sliding_window_pattern` wins).
    gated: the window counts only if `use_sliding_window` is true.
    linear_but: all layers but each n-th are linear attention without a KV cache (the config's
        `full_attention_interval` wins).
    """

    sliding: Literal["none", "every", "from_max_window_layers"] | int = "none"
    gated: bool = False
    linear_but: int | None = None
    defaults: Defaults = {}
    needs: tuple[str, ...] = ()


MHA: Defaults = {"num_key_value_heads": None}  # None: as many as query heads

_GEMMA3: Defaults = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "sliding_window": 4096,
    "max_position_embeddings": 131072,
}
_QWEN_HYBRID = Family(linear_but=4)
_FULL = Family(defaults=MHA)

FAMILIES: dict[str, Family] = {
    # full attention everywhere
    "llama": _FULL,
    "gemma": Family(defaults={"head_dim": 256}),
    "glm": Family(defaults={"head_dim": 128}),
    "glm4": Family(defaults={"head_dim": 128}),
    "granite": _FULL,
    "granitemoe": _FULL,
    "hunyuan_v1_dense": _FULL,
    "olmo": _FULL,
    "olmo2": _FULL,
    "olmoe": _FULL,
    "phi": _FULL,
    "seed_oss": Family(defaults={"head_dim": 128}),
    "stablelm": _FULL,
    "cohere": _FULL,
    # one window, every layer
    "mistral": Family(sliding="every"),
    "mixtral": Family(sliding="every"),
    "ministral": Family(sliding="every"),
    "ministral3": Family(sliding="every"),
    "phi3": Family(sliding="every", defaults=MHA),
    "phimoe": Family(sliding="every"),
    "starcoder2": Family(sliding="every"),
    # Qwen: a window only where `use_sliding_window` says so
    "qwen2": Family(sliding="from_max_window_layers", gated=True),
    "qwen2_5_vl": Family(sliding="from_max_window_layers", gated=True),
    "qwen2_5_vl_text": Family(sliding="from_max_window_layers", gated=True),
    "qwen2_vl": Family(sliding="from_max_window_layers", gated=True),
    "qwen2_vl_text": Family(sliding="from_max_window_layers", gated=True),
    "qwen3": Family(sliding="from_max_window_layers", gated=True, defaults={"head_dim": 128}),
    "qwen3_moe": Family(sliding="every", gated=True),
    "qwen3_vl_text": Family(defaults={"head_dim": 128}),
    "qwen3_vl_moe_text": Family(),
    # windows alternating with global layers
    "cohere2": Family(sliding=4, defaults={"sliding_window": 4096}),
    "exaone4": Family(sliding=4, defaults={"sliding_window": 4096}),
    "gemma2": Family(sliding=2, defaults={"head_dim": 256, "sliding_window": 4096}, needs=(LOGIT_CAP,)),
    "gemma3_text": Family(sliding=6, defaults=_GEMMA3),
    "gpt_oss": Family(sliding=2, defaults={"head_dim": 64, "sliding_window": 128}, needs=(LEARNED_SINKS,)),
    "olmo3": Family(sliding=4, defaults={"sliding_window": 4096}),
    "smollm3": Family(gated=True),
    # three linear layers for each one with a KV cache
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_5_moe_text": _QWEN_HYBRID,
}

# `model_type` of a text config that does not name its own
NESTED: dict[str, str] = {
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}

_MLA = "multi-head latent attention keeps one latent row per token, so there are no KV heads to choose from"
_STATE = "its layers keep a recurrent state, not rows per token"
_SHARED = "some of its layers read the KV cache of other layers"

# Named, so that the refusal can say why.
REFUSED: dict[str, str] = {
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "deepseek_v32": _MLA,
    "glm4_moe_lite": _MLA,
    "kimi_k2": _MLA,
    "kimi_linear": _MLA,
    "minicpm3": _MLA,
    "mistral4": _MLA,
    "falcon_mamba": _STATE,
    "mamba": _STATE,
    "mamba2": _STATE,
    "rwkv": _STATE,
    "gemma3n_text": _SHARED,
    "mllama_text_model": "its cross-attention layers cache the image, not the text",
}
