"""Footprint arithmetic equals a simulation that grows a sequence token by token and looks at every row."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvir.lowering import footprint
from kvir.lowering.pipeline import lower
from kvir.lowering.stages import LayoutPlan, Retention
from kvir.policy_ir import Policy
from kvir.policy_ir.nodes import All, IndexRange, Recent, Rule, Sink, Term, Windows
from support.models import config_model, made

RETENTIONS = st.builds(
    Retention, sink_tokens=st.integers(0, 40), recent_tokens=st.none() | st.integers(1, 80)
)


def layout_of(policy: Policy, layers: int, kv_heads: int, page_tokens: int = 16) -> LayoutPlan:
    return lower(policy, made(layers, kv_heads), dtype="bfloat16", page_tokens=page_tokens).layout


def held_pages(retention: Retention, page_tokens: int, n: int) -> set[int]:
    """Pages with at least one row that must be there at length n, row by row.

    A later request may match the first `n // P * P` tokens; the query at that position needs its window, too.
    """
    if retention.recent_tokens is None:
        return {row // page_tokens for row in range(n)}
    floor = n // page_tokens * page_tokens
    needed = [row for row in range(n) if row < retention.sink_tokens or row > floor - retention.recent_tokens]
    # sinks come as whole pages, which live and die together
    sink_pages = {row // page_tokens for row in range(min(n, retention.sink_tokens))}
    return {row // page_tokens for row in needed} | sink_pages


def one_unit(retention: Retention) -> Policy:
    recent = retention.recent_tokens
    keep: list[Term] = [All()] if recent is None else [Recent(tokens=recent)]
    if recent is not None and retention.sink_tokens:
        keep.append(Sink(tokens=retention.sink_tokens))
    return Policy(kvir=1, name="one", rules=(Rule(keep=tuple(keep)),))


@settings(max_examples=200, deadline=None)
@given(RETENTIONS, st.sampled_from([2, 4, 16]), st.integers(0, 200))
def test_one_unit_equals_the_simulation(retention: Retention, page_tokens: int, n: int) -> None:
    layout = layout_of(one_unit(retention), 1, 1, page_tokens)
    sizes = [len(held_pages(retention, page_tokens, length)) for length in range(n + 1)]
    assert footprint.resident_pages(layout, n) == sizes[n]
    assert footprint.peak_pages(layout, n) == max(sizes)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.none() | st.integers(1, 90), min_size=3, max_size=3), min_size=1, max_size=4),
    st.integers(0, 40),
    st.integers(0, 150),
)
def test_many_units_equal_the_simulation(table: list[list[int | None]], sink: int, n: int) -> None:
    policy = Policy(kvir=1, name="table", windows=Windows(table=tuple(map(tuple, table)), sink=sink))
    layout = layout_of(policy, len(table), 3)
    units = [Retention(sink_tokens=sink, recent_tokens=w) for row in table for w in row]
    sizes = [sum(len(held_pages(u, 16, length)) for u in units) for length in range(n + 1)]
    assert footprint.resident_pages(layout, n) == sizes[n]
    assert footprint.peak_pages(layout, n) == max(sizes)
    assert footprint.peak_bytes(layout, n) == max(sizes) * 2 * 16 * 8 * 2


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 60), st.integers(0, 40), st.integers(0, 60), st.integers(0, 30), st.integers(0, 200))
def test_decode_holds_its_own_retention(recent: int, sink: int, wider: int, more_sinks: int, n: int) -> None:
    outer = Retention(sink_tokens=sink + more_sinks, recent_tokens=recent + wider)
    inner = Retention(sink_tokens=sink, recent_tokens=recent)
    before, after = one_unit(outer).rules[0].keep, one_unit(inner).rules[0].keep
    policy = Policy(kvir=1, name="two", rules=(Rule(keep=before), Rule(keep=after, phase="decode")))
    layout = layout_of(policy, 1, 1)
    assert footprint.resident_pages(layout, n, "decode") == len(held_pages(inner, 16, n))
    assert footprint.resident_pages(layout, n, "prefill") == len(held_pages(outer, 16, n))


def test_llama_8b_full_is_128_kib_per_token() -> None:
    layout = lower(Policy(kvir=1, name="id"), config_model("llama-3.1-8b"), dtype="bfloat16").layout
    # 32 layers x 8 KV heads x (K and V) x 128 x 2 bytes
    assert footprint.full_bytes(layout, 16) == 16 * 128 * 1024
    assert sum(cost.bytes_per_token for cost in footprint.layer_costs(layout)) == 131_072
    assert layout.head_page_bytes == 8192
    assert layout.table_bytes_per_page == 1024
    assert layout.logical_ratio == 1


def test_32_requests_of_32k_with_a_quarter_of_the_heads_full() -> None:
    rules = (Rule(keep=(Recent(tokens=1088),)), Rule(keep=(All(),), heads=(IndexRange(first=0, last=1),)))
    layout = lower(
        Policy(kvir=1, name="q", rules=rules), config_model("llama-3.1-8b"), dtype="bfloat16"
    ).layout
    # full: 2^17 bytes x 2^15 tokens x 2^5 requests
    assert 32 * footprint.full_bytes(layout, 32_768) == 2**37
    # 64 units x 2,048 pages; 192 units x (ceil(1,087 / 16) + 1 = 69) pages
    assert footprint.peak_pages(layout, 32_768) == 64 * 2048 + 192 * 69
    assert 32 * footprint.peak_bytes(layout, 32_768) == 32 * (64 * 2048 + 192 * 69) * 8192
    assert f"{32 * footprint.peak_bytes(layout, 32_768) / 1e9:.1f}" == "37.8"
    assert f"{2**37 / 1e9:.1f}" == "137.4"
    assert layout.logical_ratio == 4


def test_a_hybrid_like_qwen_27b_by_hand() -> None:
    """64 layers, 16 of them with 4 KV heads of 256: 64 units of 1 KiB a token; linear layers pass."""
    rules = (Rule(keep=(Recent(tokens=1088),)), Rule(keep=(All(),), heads=(IndexRange(first=0, last=0),)))
    model = config_model("qwen3.6-27b")
    assert [layer.layer_id for layer in model.layers] == list(range(3, 64, 4))
    layout = lower(Policy(kvir=1, name="q", rules=rules), model, dtype="bfloat16").layout
    assert layout.unit_count == 16 * 4
    # K and V of 16 rows of 256 bfloat16
    assert layout.head_page_bytes == 2 * 16 * 256 * 2 == 16 * 1024
    # an int32 per unit and page: 16 bytes per token
    assert layout.table_bytes_per_page == 64 * 4
    assert footprint.full_bytes(layout, 32_768) == 32_768 * 64 * 1024 == 2**31
    # 16 full units of 2,048 pages, 48 of ceil(1,087 / 16) + 1 = 69
    assert footprint.peak_bytes(layout, 32_768) == (16 * 2048 + 48 * 69) * 16 * 1024
    assert [c.bytes_per_token for c in footprint.layer_costs(layout)] == [1024] * 16
    assert f"{footprint.peak_bytes(layout, 32_768) / 2**31:.1%}" == "27.5%"
    assert layout.logical_ratio == 4


def test_gemma_keeps_history_in_its_global_layers_only() -> None:
    layout = lower(Policy(kvir=1, name="id"), config_model("gemma-3-270m"), dtype="bfloat16").layout
    # 3 global layers x 1 KV head x (K and V) x 256 x 2 bytes
    # 15 sliding layers x (ceil(511 / 16) + 1 = 33) pages of 16 KiB
    costs = footprint.layer_costs(layout)
    assert sum(c.bytes_per_token for c in costs) == 3 * 1024
    assert sum(c.window_bytes for c in costs) == 15 * 33 * 16 * 1024
    assert layout.logical_ratio == 6


@pytest.mark.parametrize("memory", [0, 1, 10_000_000, 2 << 30, 20 << 30])
@pytest.mark.parametrize("keep", [(All(),), (Sink(tokens=4), Recent(tokens=1000))], ids=["all", "window"])
def test_longest_context_is_the_longest(keep: tuple[All | Sink | Recent, ...], memory: int) -> None:
    policy = Policy(
        kvir=1, name="p", rules=(Rule(keep=keep), Rule(keep=(All(),), layers=(IndexRange(first=0, last=0),)))
    )
    layout = layout_of(policy, 4, 2)
    pool = footprint.pool_size(layout, memory)
    n = footprint.longest_context(layout, memory)
    assert (
        pool.bytes
        == pool.head_pages * layout.head_page_bytes + pool.logical_pages * layout.table_bytes_per_page
    )
    assert pool.bytes <= memory
    assert footprint.peak_pages(layout, n) <= pool.head_pages
    fits = footprint.peak_pages(layout, n + 1) <= pool.head_pages and n + 1 <= pool.logical_pages * 16
    assert not fits
    if n:
        at_once = footprint.concurrency(layout, n, memory)
        assert at_once >= 1
        assert at_once * footprint.peak_bytes(layout, n) <= memory


def test_more_memory_never_fits_less() -> None:
    layout = layout_of(Policy(kvir=1, name="p", rules=(Rule(keep=(Recent(tokens=100),)),)), 4, 2)
    fits = [footprint.concurrency(layout, 500, mb << 20) for mb in range(1, 60)]
    assert fits == sorted(fits)
    assert fits[-1] > fits[0]
