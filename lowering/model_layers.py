"""Which layers of a model cache what: kinds, native windows and shapes, layer by layer.

`native_window_tokens` counts the query's own row, as transformers does: its mask keeps
`kv > q - sliding_window` (`masking_utils.sliding_window_overlay`), so `sliding_window` rows with the query's
own.  SGLang's `sliding_window_size` counts the earlier rows only and is one less.  A window as long as the
model's context never cuts anything and counts as none.
"""

from __future__ import annotations

from typing import cast

from kvir.lowering.config_reader import Config, Reader, Refused
from kvir.lowering.families import CHUNKED, LOGIT_CAP, Family
from kvir.lowering.stages import AttentionLayer

MAX_LAYERS = 4096

FULL, SLIDING, CHUNK, LINEAR = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
_SAME_AS = {"attention": FULL, "conv": LINEAR, "mamba": LINEAR, "recurrent": LINEAR}


def read_layers(text: Config, family: Family, arch: str) -> tuple[tuple[AttentionLayer, ...], int, int]:
    """(layers with a KV cache, count of all layers, context length in tokens).  Raises Refused."""
    read = Reader(text, family.defaults, arch)
    layer_count = read.positive("num_hidden_layers", most=MAX_LAYERS)
    context_tokens = read.positive("max_position_embeddings")
    query_heads = read.positive("num_attention_heads")
    kv_heads = read.positive("num_key_value_heads", otherwise=query_heads)
    head_dim = read.optional("head_dim") or read.positive("hidden_size") // query_heads
    global_kv_heads, global_head_dim = kv_heads, head_dim
    if family.global_head_dim is not None:
        global_head_dim = read.optional("global_head_dim") or family.global_head_dim
        if read.true("attention_k_eq_v"):
            global_kv_heads = read.optional("num_global_key_value_heads") or kv_heads
    window, chunk = read.optional("sliding_window"), read.optional("attention_chunk_size")
    if family.gated and not read.true("use_sliding_window"):
        window = None
    kinds = _kinds(text, family, read, layer_count)
    read.finish()
    for heads in (kv_heads, global_kv_heads):
        if query_heads % heads:
            raise Refused(
                "KV202",
                f"{query_heads} query heads do not divide into {heads} KV heads",
                "check `num_attention_heads` and `num_key_value_heads` in config.json",
            )
    bounds = {FULL: None, SLIDING: window, CHUNK: chunk}
    layers: list[AttentionLayer] = []
    for i, kind in enumerate(kinds):
        if kind == LINEAR:
            continue
        if kind not in bounds:
            raise Refused(
                "KV202",
                f"`{arch}` has a layer of kind `{kind}`, which kvir cannot plan",
                f"known kinds: {', '.join(sorted({*bounds, LINEAR, *_SAME_AS}))}",
            )
        bound = bounds[kind]
        layers.append(
            AttentionLayer(
                layer_id=i,
                query_heads=query_heads,
                kv_heads=global_kv_heads if kind == FULL else kv_heads,
                head_dim=global_head_dim if kind == FULL else head_dim,
                native_window_tokens=None if bound is None or bound >= context_tokens else bound,
            )
        )
    return tuple(layers), layer_count, context_tokens


def attention_needs(text: Config, family: Family, layers: tuple[AttentionLayer, ...]) -> tuple[str, ...]:
    """What a kernel must have to run the model, of what its family may need."""
    absent: set[str] = set()
    if not text.get("attn_logit_softcapping", 1):
        absent.add(LOGIT_CAP)
    if all(layer.native_window_tokens is None for layer in layers):
        absent.add(CHUNKED)
    return tuple(need for need in family.needs if need not in absent)


def _kinds(text: Config, family: Family, read: Reader, layer_count: int) -> list[str]:
    """The kind of every layer, as the config lists it or as the family's pattern says."""
    listed: object = text.get("layer_types")
    if not isinstance(listed, list):
        return _pattern(text, family, read, layer_count)
    kinds = [str(kind) for kind in cast(list[object], listed)]
    if len(kinds) != layer_count:
        raise Refused(
            "KV202",
            f"`layer_types` lists {len(kinds)} layers, `num_hidden_layers` says {layer_count}",
            "config.json must agree with itself",
        )
    return [_SAME_AS.get(kind, kind) for kind in kinds]


def _pattern(text: Config, family: Family, read: Reader, layer_count: int) -> list[str]:
    def all_but_each(n: int, other: str) -> list[str]:
        return [other if (i + 1) % n else FULL for i in range(layer_count)]

    match family.pattern:
        case "full":
            return [FULL] * layer_count
        case "sliding":
            return [SLIDING] * layer_count
        case "sliding_from":
            first = read.optional("max_window_layers", least=0)
            return [SLIDING if i >= (28 if first is None else first) else FULL for i in range(layer_count)]
        case "sliding_but_each":
            written: object = text.get("sliding_window_pattern")
            # EXAONE 4 writes it out: LLLG is 3 local layers and a global one
            n = len(written) if isinstance(written, str) else read.optional("sliding_window_pattern")
            kinds = all_but_each(n or family.each, SLIDING)
            # Gemma 4 ends in a global layer whatever the pattern says
            return [*kinds[:-1], FULL] if family.global_head_dim is not None else kinds
        case "linear_but_each":
            return all_but_each(read.optional("full_attention_interval") or family.each, LINEAR)
        case "chunked_with_rope":
            with_rope: object = text.get("no_rope_layers")
            if not isinstance(with_rope, list) or len(cast(list[object], with_rope)) != layer_count:
                return all_but_each(read.optional("no_rope_layer_interval") or family.each, CHUNK)
            # the field says 1 where there is rope
            return [CHUNK if rope else FULL for rope in cast(list[object], with_rope)]
        case "listed":
            raise Refused("KV202", "config.json does not list `layer_types`", "download the model again")
