"""Facts read from config.json equal the published figures, and what transformers makes of the same file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvir.lowering.config_reader import Refused
from kvir.lowering.families import FAMILIES, NESTED, REFUSED
from kvir.lowering.model_facts import facts_of, load_model
from kvir.policy_ir import PolicyError
from support.models import CONFIGS, config_model

# name: (layers with a KV cache, query heads, KV heads, head size, window or None, layers with that window)
PUBLISHED: dict[str, tuple[int, int, int, int, int | None, int]] = {
    "llama-3.1-8b": (32, 32, 8, 128, None, 0),
    "qwen3-8b": (36, 32, 8, 128, None, 0),
    "qwen2.5-7b": (28, 28, 4, 128, None, 0),
    "smollm2-135m": (30, 9, 3, 64, None, 0),
    "mistral-7b-v0.1": (32, 32, 8, 128, 4096, 32),
    "mistral-7b-v0.3": (32, 32, 8, 128, None, 0),
    "phi-3-mini-4k": (32, 32, 32, 96, 2047, 32),
    "gemma-2-9b": (42, 16, 8, 256, 4096, 21),
    "gemma-3-270m": (18, 4, 1, 256, 512, 15),
    "gemma-3-1b": (26, 4, 1, 256, 512, 22),
    "gemma-3-4b": (34, 8, 4, 256, 1024, 29),
    "gpt-oss-20b": (24, 64, 8, 64, 128, 12),
    "qwen3-30b-a3b": (48, 32, 4, 128, None, 0),
    "phi-4-mini": (32, 24, 8, 128, None, 0),  # a window as long as twice the context
    "llama-4-scout": (48, 40, 8, 128, 8192, 36),
    "qwen3-next-80b": (12, 16, 2, 256, None, 0),
    "qwen3.6-27b": (16, 24, 4, 256, None, 0),  # like it: 3 linear layers for each with a KV cache
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str) -> None:
    layers, query_heads, kv_heads, head_dim, window, sliding = PUBLISHED[name]
    model = config_model(name)
    assert len(model.layers) == layers
    assert {(x.query_heads, x.kv_heads, x.head_dim) for x in model.layers} == {
        (query_heads, kv_heads, head_dim)
    }
    windows = [x.native_window_tokens for x in model.layers]
    assert windows.count(window if sliding else None) == (sliding or layers)
    assert set(windows) <= {window, None}


@pytest.mark.parametrize("name", [p.name for p in sorted(CONFIGS.iterdir())])
def test_transformers_reads_the_same(name: str) -> None:
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(CONFIGS / name).get_text_config()
    model = config_model(name)
    kinds = getattr(config, "layer_types", None) or (
        ["sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"]
        * model.layer_count
    )
    per_layer = getattr(config, "per_layer_config", None)
    cached = {i: kind for i, kind in enumerate(kinds) if kind != "linear_attention"}
    assert [x.layer_id for x in model.layers] == list(cached)
    assert model.layer_count == config.num_hidden_layers
    assert model.context_tokens == config.max_position_embeddings
    for layer in model.layers:
        assert layer.query_heads == config.num_attention_heads
        assert layer.kv_heads == config.num_key_value_heads
        own = per_layer[layer.layer_id] if per_layer else config
        head_dim = getattr(own, "head_dim", None) or config.hidden_size // config.num_attention_heads
        assert layer.head_dim == head_dim
        kind = cached[layer.layer_id]
        window = config.sliding_window if kind == "sliding_attention" else None
        if kind == "chunked_attention":
            window = config.attention_chunk_size
        # a window that the context never fills is none
        assert layer.native_window_tokens == (window if (window or 0) < model.context_tokens else None)


def test_a_window_counts_the_querys_own_row() -> None:
    """transformers' mask for `sliding_window` = 5 lets a query see 5 rows, its own included."""
    import torch
    from transformers.masking_utils import sliding_window_causal_mask_function

    mask = sliding_window_causal_mask_function(5)
    zero = torch.tensor(0)
    seen = [kv for kv in range(40) if mask(zero, zero, torch.tensor(30), torch.tensor(kv))]
    assert seen == [26, 27, 28, 29, 30]


def test_the_fingerprint_fixes_meaning_and_nothing_else() -> None:
    config = json.loads((CONFIGS / "gemma-3-1b/config.json").read_text())
    base = facts_of(config).fingerprint
    same = {
        "torch_dtype": "float32",
        "vocab_size": 7,
        "max_position_embeddings": 8192,
        "architectures": ["X"],
    }
    other = {
        "num_hidden_layers": 27,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "sliding_window": 256,
        "sliding_window_pattern": 5,
        "model_type": "cohere2",
    }
    assert all(facts_of({**config, k: v}).fingerprint == base for k, v in same.items())
    changed = [facts_of({**config, k: v}).fingerprint for k, v in other.items()]
    assert base not in changed
    assert len(set(changed)) == len(other)


def test_dtype_comes_from_the_config() -> None:
    config = json.loads((CONFIGS / "tiny-llama/config.json").read_text())
    del config["torch_dtype"]
    assert facts_of(config).dtype == "float32"
    assert facts_of({**config, "dtype": "float16"}).dtype == "float16"
    assert facts_of({**config, "torch_dtype": "bfloat16"}).dtype == "bfloat16"
    assert facts_of({**config, "quantization_config": {"quant_method": "mxfp4"}}).dtype == "bfloat16"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_one_of_transformers(family: str) -> None:
    from transformers import CONFIG_MAPPING

    assert family in CONFIG_MAPPING or family in {"qwen3_vl_text", "qwen3_vl_moe_text", "qwen2_5_vl_text"}
    assert family not in REFUSED


@pytest.mark.parametrize(
    "content", [b"", b"[]", b'"x"', b"{}", b'{"model_type": 3}', b"\xff\xfe", b'{"text_config": 1}']
)
def test_nonsense_is_refused_with_a_diagnostic(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(PolicyError, match=r"error\[KV20[0-2]\]"):
        load_model(tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_of_a_family_are_those_of_transformers(family: str) -> None:
    """A config that gives shapes only: everything else is the family's own."""
    from transformers import CONFIG_MAPPING

    config: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": 9,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 64,
        "max_position_embeddings": 1 << 20,
        "use_sliding_window": True,
        "max_window_layers": 5,
    }
    if FAMILIES[family].pattern == "listed":
        linear, full = ("mamba", "attention") if family == "granitemoehybrid" else ("conv", "full_attention")
        config["layer_types"] = [linear, full, *[linear] * 7]
    outer = {v: k for k, v in NESTED.items()}.get(family, family)
    reference: Any = CONFIG_MAPPING[family if family in CONFIG_MAPPING else outer]
    reference = reference.sub_configs.get(
        "text_config", reference
    )  # known only as a part of its outer config
    theirs = reference(**{k: v for k, v in config.items() if k != "model_type"})
    ours = facts_of(config)
    kinds = getattr(theirs, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if getattr(theirs, "sliding_window", None) else "full_attention"] * 9
    cached = {i: k for i, k in enumerate(kinds) if k not in ("linear_attention", "conv", "mamba")}
    assert [x.layer_id for x in ours.layers] == list(cached)
    assert set(ours.needs) == set(FAMILIES[family].needs)
    for layer in ours.layers:
        kind = cached[layer.layer_id]
        if kind == "sliding_attention":
            assert layer.native_window_tokens == theirs.sliding_window
        elif kind == "chunked_attention":
            assert layer.native_window_tokens == theirs.attention_chunk_size
        else:
            assert layer.native_window_tokens is None
        per_layer = getattr(theirs, "per_layer_config", None)
        own = per_layer[layer.layer_id] if per_layer else theirs
        assert layer.head_dim == (getattr(own, "head_dim", None) or 16), kind


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="cannot be read"):
        load_model(tmp_path / "none")


def test_wild_values_are_refused_not_crashed_on() -> None:
    """Any field of a config may hold anything."""
    base = json.loads((CONFIGS / "gemma-3-1b/config.json").read_text())
    wild: list[Any] = [None, -1, 0, True, 1.5, "x", [], {}, [1], 1 << 70, [None] * 26, ["full_attention"]]
    refused = read = 0
    fields = [*base, "layer_types", "text_config", "dtype", "is_encoder_decoder", "max_window_layers"]
    for field in fields:
        for value in wild:
            config = msgspec.json.decode(json.dumps({**base, field: value}))
            try:
                model = facts_of(config)
            except Refused:
                refused += 1
            else:
                assert len(model.layers) >= 1, (field, value)
                read += 1
    assert refused > 50
    assert read > 50
