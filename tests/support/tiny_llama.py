"""A llama small enough to serve in tests, whose answers depend on every row that its heads read.

Random weights at their usual scale attend to everything alike and give almost uniform logits, so a wrong row
would drown.  These are scaled so that some dozen rows carry each head, attention outweighs the residual
stream, and logits are decided: one row more or less in one head moves a log-probability by more than 1e-2,
while float32 is exact to about 1e-5 over thousands of tokens.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 320  # 256 bytes, the two marks of a sequence, and fillers up to a multiple of 64
BOS, EOS = 256, 257
SCORE_STD = 2.0  # of q . k / sqrt(head_dim)
ATTENTION_GAIN = 1.5  # of what a layer's attention adds to the residual stream
LOGIT_STD = 2.5


def make(
    folder: Path,
    *,
    layers: int = 4,
    query_heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    context_tokens: int = 16_384,
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
        tie_word_embeddings=False,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).float()
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                torch.nn.init.normal_(weight, std=_std(name, weight.shape[1]))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def _std(name: str, inputs: int) -> float:
    """Inputs of every projection have unit size (a norm comes before it), so these set the size of its
    output.
    """
    match name.rsplit(".", 2)[-2]:
        case "q_proj" | "k_proj":
            return (SCORE_STD / inputs) ** 0.5
        case "o_proj":
            return ATTENTION_GAIN / inputs**0.5
        case "lm_head":
            return LOGIT_STD / inputs**0.5
        case "embed_tokens":
            return 1.0
        case _:
            return 1 / inputs**0.5


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
