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


Pattern = Literal[
    "full",  # every layer is global
    "sliding",  # every layer has the native window
    "sliding_from",  # those from `max_window_layers` on
    "sliding_but_each",  # all but each n-th; the config's `sliding_window_pattern` wins over `each`
    "linear_but_each",  # all but each n-th have no KV cache; `full_attention_interval` wins
    "chunked_with_rope",  # all but each n-th see their own chunk only; `no_rope_layers` wins
    "listed",  # nobody knows without the config's `layer_types`
]


class Family(Struct, frozen=True, kw_only=True):
    """How a family's config is read.

    pattern, each: the kinds of layers of a config that does not list `layer_types`.
    gated: the window counts only if `use_sliding_window` is true.
    global_head_dim: global layers have this head size, or the config's, and may have their own KV heads.
    needs: features that attention may need; the config decides.
    """

    pattern: Pattern = "full"
    each: int = 1
    gated: bool = False
    global_head_dim: int | None = None
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
_WINDOW_4096: Defaults = {"sliding_window": 4096}
_QWEN = Family(pattern="sliding_from", gated=True, defaults=_WINDOW_4096)
_QWEN_HYBRID = Family(pattern="linear_but_each", each=4, defaults={"head_dim": 256})
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
    "mistral": Family(pattern="sliding", defaults=_WINDOW_4096),
    "mixtral": Family(pattern="sliding"),
    "ministral": Family(pattern="sliding", defaults=_WINDOW_4096),
    "ministral3": Family(pattern="sliding", defaults={"head_dim": 128}),
    "phi3": Family(pattern="sliding", defaults=MHA),
    "phimoe": Family(pattern="sliding"),
    "starcoder2": Family(pattern="sliding"),
    # Qwen: a window only where `use_sliding_window` says so
    "qwen2": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen2_5_vl_text": _QWEN,
    "qwen2_vl": _QWEN,
    "qwen2_vl_text": _QWEN,
    "qwen3": Family(pattern="sliding_from", gated=True, defaults={"head_dim": 128, "sliding_window": 4096}),
    "qwen3_moe": Family(pattern="sliding", gated=True, defaults=_WINDOW_4096),
    "qwen3_vl_text": Family(defaults={"head_dim": 128}),
    "qwen3_vl_moe_text": Family(),
    # windows alternating with global layers
    "cohere2": Family(pattern="sliding_but_each", each=4, defaults=_WINDOW_4096),
    "exaone4": Family(pattern="sliding_but_each", each=4, defaults=_WINDOW_4096),
    "gemma2": Family(
        pattern="sliding_but_each",
        each=2,
        defaults={"head_dim": 256, "sliding_window": 4096},
        needs=(LOGIT_CAP,),
    ),
    "gemma4_text": Family(
        pattern="sliding_but_each",
        each=6,
        global_head_dim=512,
        defaults={"head_dim": 256, "sliding_window": 512},
    ),
    "gemma3_text": Family(pattern="sliding_but_each", each=6, defaults=_GEMMA3),
    "gpt_oss": Family(
        pattern="sliding_but_each",
        each=2,
        defaults={"head_dim": 64, "sliding_window": 128},
        needs=(LEARNED_SINKS,),
    ),
    "olmo3": Family(pattern="sliding_but_each", each=4, defaults=_WINDOW_4096),
    "smollm3": Family(gated=True),
    # chunks instead of windows
    "llama4_text": Family(
        pattern="chunked_with_rope",
        each=4,
        defaults={"head_dim": 128, "num_key_value_heads": None, "attention_chunk_size": 8192},
        needs=(CHUNKED,),
    ),
    # layers of several kinds, as listed
    "granitemoehybrid": Family(pattern="listed", defaults=MHA),
    "lfm2": Family(pattern="listed"),
    "lfm2_moe": Family(pattern="listed"),
    # three linear layers for each one with a KV cache
    "qwen3_next": _QWEN_HYBRID,
    "qwen3_5_text": _QWEN_HYBRID,
    "qwen3_5_moe_text": _QWEN_HYBRID,
}

# `model_type` of a text config that does not name its own
NESTED: dict[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
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
