"""Decode steps of the backend and of its decoder, captured and replayed (`support.capture`).

Run as `support.triton_cases` is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvir.kernels.catalog import decode_tile
from kvir.kernels.ops import FULL, Bounds, Cache
from kvir.kernels.ref.ops import KERNELS as REF
from support import tiny_llama
from support.capture import Launch, capturing, replay
from support.servers import policy
from support.triton_cases import off, run

TOKENS = 640  # logical ids
LENGTHS = ((200, 31, 1, 0), (17, 230, 16, 90), (64, 65, 0, 0), (3, 1, 2, 150))


class Step:
    """A decode step of one bucket through the backend: static inputs, the launches, the outputs."""

    def __init__(self, backend: Any, bucket: int) -> None:
        from sglang.srt.layers.radix_attention import AttentionType

        self.backend, self.bucket = backend, bucket
        layout = backend.pool.plan.layout
        self.rows = torch.zeros(bucket, dtype=torch.int64)
        self.lens = torch.zeros(bucket, dtype=torch.int64)
        self.slots = torch.zeros(bucket, dtype=torch.int64)
        self.q = torch.zeros(bucket, layout.query_heads * layout.head_dim)
        self.k, self.v = (torch.zeros(bucket, layout.kv_heads * layout.head_dim) for _ in range(2))
        self.layers = [
            SimpleNamespace(layer_id=i, scaling=0.2, logit_cap=0.0, attn_type=AttentionType.DECODER)
            for i in backend.layer_index
        ]
        self.launches, self.facts = self.capture()

    def view(self) -> Any:
        return SimpleNamespace(
            batch_size=self.bucket, req_pool_indices=self.rows, seq_lens=self.lens,
            seq_lens_cpu=self.lens.clone(), out_cache_loc=self.slots,
        )  # fmt: skip

    def capture(self) -> tuple[list[Launch], list[Any]]:
        """In the order of SGLang's runner."""
        view = self.view()
        self.backend.init_forward_metadata_out_graph(view, in_capture=True)
        with capturing() as (launches, mode):
            self.backend.init_forward_metadata_in_graph(view)
            self.outs = [self.backend.forward_decode(self.q, self.k, self.v, x, view) for x in self.layers]
        return launches, [launch.facts(mode.fresh) for launch in launches]

    def replay(self, lengths: tuple[int, ...], req_to_token: Tensor) -> float:
        """A batch of these lengths, padded to the bucket; the error of all layers over what is allowed."""
        real = [i for i, n in enumerate(lengths[: self.bucket]) if n]
        self.rows.zero_()
        self.lens.zero_()
        self.slots.zero_()
        for place, i in enumerate(real):
            self.rows[place], self.lens[place] = i + 1, lengths[i]
            self.slots[place] = req_to_token[i + 1, lengths[i] - 1]
        for tensor in (self.q, self.k, self.v):
            tensor.normal_()
        self.backend.init_forward_metadata_out_graph(self.view())
        replay(self.launches)
        pool = self.backend.pool
        pages = (req_to_token[self.rows, :: pool.page_size] // pool.page_size).to(torch.int32)
        worst = 0.0
        for layer, out in enumerate(self.outs):
            q = self.q.view(self.bucket, -1, pool.plan.layout.head_dim)
            wanted = torch.empty_like(q)
            holes = REF.attend_decode(
                q, pool.cache, pages, self.lens.to(torch.int32), pool.decode_bounds,
                layer * pool.plan.layout.kv_heads, pool.plan.layout.kv_heads, 0.2, 0.0, wanted,
            )  # fmt: skip
            assert holes == 0
            worst = max(worst, off(out.view_as(wanted), wanted))
        assert int(self.backend._decoder.holes) == 0
        return worst


def backend_of(folder: Path, name: str = "table") -> tuple[Any, Tensor]:
    """The backend with pool and allocator of a plan, and req_to_token; every page is resident."""
    from kvir.lowering.load import plan_for_server
    from kvir.sglang_ext import standin

    standin.install()
    from kvir.sglang_ext.allocator import KvirAllocator
    from kvir.sglang_ext.pool import KvirPool
    from kvir.sglang_ext.triton_backend import KvirTritonBackend

    plan = plan_for_server(policy(name), tiny_llama.make(folder), dtype="float32")
    pool = KvirPool(
        plan,
        logical_tokens=TOKENS,
        physical_tokens=TOKENS + 16,
        shadow_rows=4,
        dtype=torch.float32,
        device="cpu",
    )
    allocator = KvirAllocator(
        TOKENS, torch.float32, "cpu", pool, need_sort=False, debug=False, chunk_tokens=64
    )
    torch.manual_seed(1)
    pool.kv.normal_()
    pages = TOKENS // 16
    pool.table[1 : pages + 1] = torch.randperm(pages * plan.layout.unit_count).view(pages, -1).to(torch.int32)
    req_to_token = torch.zeros(6, 256, dtype=torch.int32)
    shuffled = (torch.randperm(pages)[:40].view(5, 8) + 1) * 16
    # requests share pages here, which decode does not mind: 16 pages of 256 tokens from 8 of each
    whole = torch.cat([shuffled, shuffled.roll(1, 0)], dim=1)
    req_to_token[1:] = (whole[:, :, None] + torch.arange(16)).view(5, 256)
    runner: Any = SimpleNamespace(
        token_to_kv_pool=pool, token_to_kv_pool_allocator=allocator, model=torch.nn.Module(),
        req_to_token_pool=SimpleNamespace(req_to_token=req_to_token),
    )  # fmt: skip
    return KvirTritonBackend(runner), req_to_token


def memory_is_what_the_planner_says() -> float:
    """Static memory of decode, to the byte: without rows by score, and with them."""
    from kvir.kernels.triton.decoder import Decoder, Sizes
    from kvir.kernels.triton.trigger import Trigger
    from kvir.lowering.course import most_compact_pages
    from kvir.lowering.graph_buckets import decoder_bytes
    from kvir.lowering.load import plan_for_server
    from kvir.lowering.triggers import device_selections
    from kvir.sglang_ext import standin

    with TemporaryDirectory() as folder:
        model = tiny_llama.make(Path(folder))
        layouts = [
            plan_for_server(policy(x), model, dtype="float32").layout for x in ("table", "snapkv", "captured")
        ]
    for layout, batch in product(layouts, (1, 3, 16)):
        spare = max((most_compact_pages(layout, c) for c in layout.compact), default=0)
        assert (spare > 0) == (layout is not layouts[0])
        facts, dim = layout.budgeted.bound.model, layout.head_dim
        context = facts.context_tokens // 16, spare, len(facts.layers)
        sizes = Sizes(batch, *context, layout.kv_heads, layout.query_heads, dim, 16)
        zeros = torch.zeros(layout.unit_count, dtype=torch.int32)
        decoder = Decoder(sizes, decode_tile(dim, 3, "float32"), Bounds(zeros, zeros), "cpu")
        wanted = decoder.nbytes
        selections = device_selections(layout)
        assert bool(selections.nuclei) == (layout is layouts[2])
        if selections.nuclei:
            standin.install()
            from kvir.sglang_ext.triggers import nuclei_of

            trigger = Trigger(
                decoder, nuclei_of(selections, layout.unit_count), ring_rows=batch,
                candidates=selections.candidates, dtype=torch.float32,
            )  # fmt: skip
            wanted += trigger.nbytes
        assert wanted == decoder_bytes(batch, decoder.work.slots, layout)
    return 0.0


def replays_follow_lengths() -> float:
    """Buckets of 4 and 2, captured once, replayed in turns with lengths, pages and batches that change."""
    with TemporaryDirectory() as folder:
        backend, req_to_token = backend_of(Path(folder))
    backend.init_cuda_graph_state(4, 4)
    assert backend.get_cuda_graph_seq_len_fill_value() == 0
    steps = [Step(backend, 4), Step(backend, 2)]  # largest first
    assert all(len(step.launches) == 3 + 3 * len(step.layers) for step in steps)
    worst = 0.0
    for turn, lengths in enumerate(LENGTHS):
        for step in steps:
            worst = max(worst, step.replay(lengths, req_to_token))
        req_to_token[1:] = req_to_token[1:].roll(turn + 1, 0)
    for step in steps:
        # captured again after all that, the step is the same: no pointer, shape or number has changed
        assert step.capture()[1] == step.facts
    return worst


def selections_are_captured() -> float:
    """A step of a backend whose plan selects in decode: a launch more in every layer, and four at the end."""
    with TemporaryDirectory() as folder:
        backend, _ = backend_of(Path(folder), "captured")
    assert backend._triggers is not None
    step = Step(backend, 4)
    assert len(step.launches) == 3 + 4 * len(step.layers) + 4
    assert step.capture()[1] == step.facts
    return 0.0


def replays_follow_compact_rows() -> float:
    """Requests that were compacted, and others, change places between replays."""
    from kvir.kernels.triton.decoder import Decoder, Placed, Sizes

    torch.manual_seed(2)
    heads, layers, dim = 2, 2, 64
    units = heads * layers
    table = torch.randperm(60 * units).to(torch.int32).view(60, units)
    cache = Cache(torch.randn(60 * units, 2, 16, dim), table)
    plain = Bounds(torch.zeros(units, dtype=torch.int32), torch.full((units,), FULL, dtype=torch.int32))
    sizes = Sizes(3, 16, 4, layers, heads, heads * 3, dim, 16)
    decoder = Decoder(sizes, decode_tile(dim, 3, "float32"), plain, "cpu")
    rows, lens = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    pages_of = torch.randperm(40)[:36].view(3, 12).to(torch.int32)
    req_to_token = (pages_of[:, :, None] * 16 + torch.arange(16, dtype=torch.int32)).view(3, -1)
    q = torch.randn(3, heads * 3, dim)
    outs = [torch.empty_like(q) for _ in range(layers)]
    with capturing() as (launches, _):
        decoder.plan(req_to_token, rows, lens)
        for layer, out in enumerate(outs):
            decoder.attend(layer, q, cache, 0.2, 0.0, out)

    def placed(spare: int, tokens: int) -> Placed:
        sink = torch.randint(1, spare * 16 + 1, (units,), dtype=torch.int32)
        recent = torch.randint(1, tokens + 1, (units,), dtype=torch.int32)
        return Placed(torch.arange(40, 40 + spare, dtype=torch.int32), sink, recent)

    worst = 0.0
    steps = ((100, 40, 180), (0, 2)), ((33, 1, 0), ()), ((90, 180, 17), (1,)), ((5, 6, 7), ())
    for lengths, where in steps:
        lens.copy_(torch.tensor(lengths))
        q.normal_()
        requests = [placed(3, n) if i in where else None for i, n in enumerate(lengths)]
        decoder.place(requests)
        replay(launches)
        wanted = [torch.empty_like(q) for _ in range(layers)]
        for b, (n, own) in enumerate(zip(lengths, requests, strict=True)):
            pages, bounds, total = pages_of[b], plain, n
            if own is not None:
                pages, bounds = torch.cat([own.spare_rows, pages]), Bounds(own.sink, own.recent)
                total = n + 16 * len(own.spare_rows)
            one, length = slice(b, b + 1), torch.tensor([total], dtype=torch.int32)
            for layer, out in enumerate(wanted):
                REF.attend_decode(
                    q[one], cache, pages[None], length, bounds, layer * heads, heads, 0.2, 0.0, out[one]
                )
        worst = max(worst, *(off(a, b) for a, b in zip(outs, wanted, strict=True)))
    assert int(decoder.holes) == 0
    return worst


CASES: dict[str, Callable[[], float]] = {
    "memory-is-what-the-planner-says": memory_is_what_the_planner_says,
    "replays-follow-lengths": replays_follow_lengths,
    "selections-are-captured": selections_are_captured,
    "replays-follow-compact-rows": replays_follow_compact_rows,
}

if __name__ == "__main__":
    json.dump(run(CASES), sys.stdout)
