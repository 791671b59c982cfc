"""Tiny random models of several families, saved as folders with a tokenizer of bytes.  No downloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

_COMMON: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
_HYBRID = ["sliding_attention", "full_attention", "full_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "gemma2": {
        "model_type": "gemma2",
        "sliding_window": 24,
        "layer_types": _HYBRID,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "layer_types": _HYBRID,
        "query_pre_attn_scalar": 8,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "sliding_window": 24,
        "layer_types": _HYBRID,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "partial_rotary_factor": 0.5,
    },
}


def tiny_model(folder: Path, family: str, *, seed: int = 0) -> Path:
    """A random float32 model; large query and key weights make attention sharp."""
    torch.manual_seed(seed)
    fields = dict(_COMMON | FAMILIES[family])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or weight.ndim < 2:
                continue
            weight.normal_(0, 0.7 if "q_proj" in name or "k_proj" in name else 0.25)
        for name, weight in model.named_parameters():
            if name.endswith("sinks"):
                weight.normal_(0, 1)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


TEXT = " ".join(
    f"The {a} of {b} met {b * 7 % 31} {a}s near the river." for b in range(60) for a in ("king", "bear")
)
