"""Figures of devices, ranks and graph buckets, and the text forms of bytes and tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvir.lowering import footprint
from kvir.lowering.device_facts import DEVICES
from kvir.lowering.graph_buckets import MAX_BATCH, decode_buckets, splits
from kvir.lowering.pipeline import lower
from kvir.lowering.stages import LayoutPlan
from kvir.lowering.tensor_parallel import rank_heads, rank_layout
from kvir.lowering.units import human_bytes, parse_bytes, parse_tokens
from kvir.policy_ir import Policy
from kvir.policy_ir.nodes import All, IndexRange, Recent, Rule, Sink, Windows
from support.models import config_model, made

QUARTER = Policy(
    kvir=1,
    name="quarter",
    rules=(
        Rule(keep=(Sink(tokens=4), Recent(tokens=1024))),
        Rule(keep=(All(),), heads=(IndexRange(first=0, last=1),)),
    ),
)


def llama(policy: Policy = QUARTER) -> LayoutPlan:
    return lower(policy, config_model("llama-3.1-8b"), dtype="bfloat16").layout


# ---- ranks -------------------------------------------------------------------------------------------------


def test_ranks_share_the_heads_in_order() -> None:
    assert [list(rank_heads(8, 4, r)) for r in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [list(rank_heads(2, 4, r)) for r in range(4)] == [[0], [0], [1], [1]]
    assert list(rank_heads(8, 1, 0)) == list(range(8))


@pytest.mark.parametrize(("heads", "ranks"), [(8, 3), (3, 2), (2, 3)])
def test_heads_that_do_not_divide_are_refused(heads: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"{heads} KV heads do not divide over {ranks} ranks"):
        rank_heads(heads, ranks, 0)


def test_query_heads_must_divide_too() -> None:
    layout = lower(QUARTER, made(2, 2, group=3), dtype="bfloat16").layout
    with pytest.raises(ValueError, match="6 query heads do not divide over 4 ranks"):
        rank_layout(layout, 4, 0)


@given(
    st.lists(st.lists(st.none() | st.integers(1, 90), min_size=4, max_size=4), min_size=1, max_size=4),
    st.integers(0, 400),
    st.sampled_from([1, 2, 4]),
)
def test_ranks_add_up_to_the_whole(table: list[list[int | None]], n: int, ranks: int) -> None:
    policy = Policy(kvir=1, name="t", windows=Windows(table=tuple(map(tuple, table)), sink=4))
    layout = lower(policy, made(len(table), 4), dtype="bfloat16").layout
    parts = [rank_layout(layout, ranks, r) for r in range(ranks)]
    assert sum(footprint.peak_pages(p, n) for p in parts) == footprint.peak_pages(layout, n)
    assert sum(footprint.resident_pages(p, n) for p in parts) == footprint.resident_pages(layout, n)
    assert sum(p.table_bytes_per_page for p in parts) == layout.table_bytes_per_page
    for r, part in enumerate(parts):
        assert sorted(u for c in part.classes for u in c.units) == list(range(part.unit_count))
        # head h of the rank is head r * share + h of the model
        alone = Policy(
            kvir=1,
            name="r",
            windows=Windows(
                table=tuple(tuple(row[r * 4 // ranks : (r + 1) * 4 // ranks]) for row in table), sink=4
            ),
        )
        assert part.classes == lower(alone, made(len(table), 4 // ranks), dtype="bfloat16").layout.classes


def test_the_full_heads_of_one_rank_set_the_limit() -> None:
    layout = llama()
    parts = [rank_layout(layout, 4, r) for r in range(4)]
    assert [sum(c.bytes_per_token for c in footprint.layer_costs(p)) for p in parts] == [32_768, 0, 0, 0]


# ---- devices and buckets -----------------------------------------------------------------------------------


def test_devices_by_name() -> None:
    assert DEVICES["h200"].memory_bytes == 141 * 10**9
    assert DEVICES["h200"].bytes_per_second == 4_800 * 10**9
    assert {d.kind for d in DEVICES.values()} == {"cpu", "cuda"}
    assert all(name == d.name for name, d in DEVICES.items())


def test_a_cpu_has_no_buckets() -> None:
    assert decode_buckets(llama(), DEVICES["cpu"]) == ()


@pytest.mark.parametrize("name", [n for n, d in DEVICES.items() if d.kind == "cuda"])
def test_buckets_fill_the_device(name: str) -> None:
    layout, device = llama(), DEVICES[name]
    buckets = decode_buckets(layout, device)
    batches = [b.batch for b in buckets]
    assert batches[:7] == [1, 2, 4, 8, 12, 16, 24]
    assert batches == sorted(set(batches))
    assert batches[-1] == MAX_BATCH
    assert [b.splits for b in buckets] == sorted((b.splits for b in buckets), reverse=True)
    multiprocessors = device.multiprocessors or 108
    for b in buckets:
        assert b.splits == 1 or b.batch * layout.kv_heads * (b.splits - 1) < 2 * multiprocessors
    # 8,192 pages, a length and a slot per request; 32 query heads, 33 splits of 128 + 2 floats
    assert splits(1, 8, DEVICES["h100"]) == 33
    h100 = decode_buckets(layout, DEVICES["h100"])
    assert h100[0].static_bytes == 4 * 8192 + 4 + 8 + 32 * 33 * 130 * 4
    assert h100[-1].static_bytes == 256 * (4 * 8192 + 4 + 8)


# ---- text forms --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GiB", 2 << 30),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 << 29),
        ("512M", 512 << 20),
        ("100", 100),
        ("7 kib", 7168),
        ("3B", 3),
    ],
)
def test_bytes_as_people_write_them(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 gigs", "1e9", "2GiBx"])
def test_nonsense_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_tokens_as_people_write_them() -> None:
    assert [parse_tokens(t) for t in ("1", "4k", "32K", "1m")] == [1, 4096, 32768, 1 << 20]
    for text in ("0", "", "k", "1.5k", "-4"):
        with pytest.raises(ValueError, match="is not a number of tokens"):
            parse_tokens(text)


def test_bytes_as_people_read_them() -> None:
    assert human_bytes(0) == "0 B"
    assert human_bytes(8192) == "8,192 B"
    assert human_bytes(20 << 10) == "20.0 KiB"
    assert human_bytes(3 << 29) == "1.50 GiB"
    assert human_bytes(131 << 30) == "131 GiB"
    assert human_bytes(5 << 40) == "5.00 TiB"
