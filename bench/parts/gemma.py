"""One long request to stock SGLang and to kvir: its answer, and the bytes of K and V that it holds.

This is for Gemma 3: of its sliding layers stock SGLang 0.5.23 keeps all rows, kvir those in the window.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from evaluation.server import Launch, Served, serve
from evaluation.watch import kvir_state
from kvir.lowering.model_facts import load_model

POOL_LINE = re.compile(r"KV Cache is allocated.*?#tokens: (\d+), K size: ([\d.]+) GB, V size: ([\d.]+) GB")
PRINTED_GIB = 0.01  # how far two rounded sizes may be off
GIB = 1 << 30


@dataclass(frozen=True)
class Run:
    answer: Served
    bytes_held: int


def full_token_bytes(launch: Launch) -> int:
    """K and V of one token in every layer."""
    size = {"float32": 4, "bfloat16": 2}[launch.dtype]
    return sum(2 * layer.kv_heads * layer.head_dim * size for layer in load_model(launch.model).layers)


def stock(launch: Launch, prompt_ids: Sequence[int], new_tokens: int) -> Run:
    """Stock SGLang.  That its pool has every layer's rows for every token is read from its log."""
    with serve(launch) as server:
        answer = server.generate(prompt_ids, new_tokens)
        found = POOL_LINE.search(server.log.read_text(errors="replace"))
    assert found is not None, "stock SGLang did not say how large its pool is"
    tokens, *gib = found.groups()
    expected = int(tokens) * full_token_bytes(launch) / GIB
    assert abs(sum(map(float, gib)) - expected) <= PRINTED_GIB, f"a pool of {gib} GB, not of {expected:.2f}"
    return Run(answer, (len(prompt_ids) + new_tokens) * full_token_bytes(launch))


def kvir(launch: Launch, prompt_ids: Sequence[int], new_tokens: int) -> Run:
    """kvir, with what the request held at most."""
    with serve(launch) as server:
        answer = server.generate(prompt_ids, new_tokens)
        state = kvir_state(server)
    return Run(answer, state["head_pages"]["peak_covered"] * state["head_page_bytes"])
