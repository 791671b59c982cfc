"""Tiny random models that a server starts with in seconds.  The same arguments make the same weights.

Attention weights are drawn wider than transformers would, so that attention is not nearly uniform: a row
taken from one head moves log-probabilities by far more than the tolerance of the oracle.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 320  # 256 bytes, the two marks of a sequence, and fillers up to a multiple of 64
BOS, EOS = 256, 257
# Standard deviation of the attention weights.  At 0.1 float32 agrees with float64 to 5e-6 over 600 tokens,
# and one row more or less in one head moves a log-probability by 1e-3.
SPREAD = 0.1


def make(
    folder: Path,
    *,
    layers: int = 4,
    query_heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 32,
    context_tokens: int = 4096,
    seed: int = 0,
) -> Path:
    """Write a random Llama (float32) with a byte-level tokenizer to `folder`, and return it."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=query_heads * 16,
        intermediate_size=query_heads * 32,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context_tokens,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=SPREAD if "self_attn" in name else 0.1)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, so that any text can be asked and any answer can be shown."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = ["<s>", "</s>", *(f"<filler{i}>" for i in range(VOCABULARY - 258))]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *marks])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def token_stream(count: int, seed: int = 0) -> list[int]:
    """Random bytes to cut prompts from."""
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]
