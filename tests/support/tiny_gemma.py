"""A Gemma 3 small enough to serve in tests: two of three layers slide, and every row counts.

Queries and keys are normed, so the scale of the logits is `query_pre_attn_scalar`'s; the other weights follow
`tiny_llama`.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from support.tiny_llama import ATTENTION_GAIN, BOS, EOS, SCORE_STD, VOCABULARY, byte_tokenizer

WINDOW_TOKENS = 72  # not a multiple of a page
HEAD_DIM = 64
LAYERS = ("sliding_attention", "sliding_attention", "full_attention") * 2


def make(folder: Path, *, seed: int = 0) -> Path:
    """Write a random Gemma 3 (float32) with a byte-level tokenizer to `folder`, and return it."""
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        # logits have a standard deviation of sqrt(head_dim / scalar)
        query_pre_attn_scalar=round(HEAD_DIM / SCORE_STD**2),
        sliding_window=WINDOW_TOKENS,
        layer_types=list(LAYERS),
        max_position_embeddings=16_384,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        tie_word_embeddings=True,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Gemma3ForCausalLM(config).float()
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                gain = ATTENTION_GAIN if "o_proj" in name else 1.0
                torch.nn.init.normal_(weight, std=gain / weight.shape[1] ** 0.5)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
