"""What only a GPU can tell of the Triton kernels.  Prepared on machines without one: not measured until run.

    python -m bench.gpu_check [--json FILE] [--quick]

Needs torch, triton, numpy and this repository; FlashInfer and SGLang are compared with if they can be
imported.  Takes up to 6 minutes:

graph      decode of several layers captured as a CUDA graph and replayed while lengths change
triggers   steps that select, captured and replayed while requests grow, select, change places and end
cases      attention cases of the tests in random order, as many as fit, against the reference on the CPU
selections every score and budget: the rows that stay on the GPU are those that stay on the CPU
flashinfer prefill of whole layers, in a server's way, if FlashInfer is there
bandwidth  decode against a measured copy: Llama-3.1-8B shapes, 32 requests of 32k tokens, a quarter of the
           heads full; the same with other tiles; with full KV; and by other kernels
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)]

from bench.parts.gpu_cases import flashinfer_prefill, run_on_gpu, unequal_selections, wrong_of  # noqa: E402
from bench.parts.gpu_rivals import flashinfer_decode, sglang_decode  # noqa: E402
from kvir.kernels.catalog import Tile  # noqa: E402
from kvir.kernels.ops import FULL, Bounds, Cache  # noqa: E402
from kvir.kernels.ref.ops import KERNELS as REF  # noqa: E402
from kvir.kernels.triton import ops  # noqa: E402
from kvir.kernels.triton.decoder import Decoder, Sizes  # noqa: E402
from support import trigger_case, triton_cases  # noqa: E402

HEADS, GROUP, DIM, PAGE_ROWS = 8, 4, 128, 16  # Llama-3.1-8B
WINDOW_ROWS = 1088
SECONDS = 330  # after which no new measurement starts
STARTED = time.monotonic()
TILES = ((64, 4, 3), (64, 4, 2), (64, 4, 4), (32, 4, 3), (32, 4, 4), (64, 8, 3), (128, 8, 2))

figures: dict[str, object] = {}


def add(name: str, value: object) -> None:
    figures[name] = value
    print(f"bench: {name} = {value}", flush=True)


def late() -> bool:
    return time.monotonic() - STARTED > SECONDS


# ---- problems ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ragged:
    """Layers of decode with head-pages in random order, on the GPU."""

    decoder: Decoder
    cache: Cache
    q: Tensor  # [B, Hq, D]
    req_to_token: Tensor
    rows: Tensor
    lens: Tensor
    visible: list[int]  # rows of each lane of one layer

    @property
    def layer_bytes(self) -> int:
        return sum(self.visible) * 2 * DIM * self.cache.kv.element_size()


def ragged(batch: int, tokens: int, full_heads: int, layers: int, tile: Tile | None = None) -> Ragged:
    units = HEADS * layers
    pages_each = tokens // PAGE_ROWS
    recent = torch.tensor([FULL if u % HEADS < full_heads else WINDOW_ROWS for u in range(units)])
    bounds = Bounds(torch.zeros(units, dtype=torch.int32).cuda(), recent.to(torch.int32).cuda())
    first = (tokens - recent).clamp(min=0) // PAGE_ROWS  # page of each unit
    resident = (torch.arange(pages_each)[:, None] >= first).repeat(batch, 1)
    table = torch.full((batch * pages_each, units), -1, dtype=torch.int32)
    count = int(resident.sum())
    table[resident] = torch.randperm(count).to(torch.int32)
    kv = torch.empty((count, 2, PAGE_ROWS, DIM), dtype=torch.bfloat16, device="cuda").normal_()
    q = torch.randn((batch, HEADS * GROUP, DIM), dtype=torch.bfloat16, device="cuda")
    sizes = Sizes(batch, pages_each, 0, layers, HEADS, HEADS * GROUP, DIM, PAGE_ROWS)
    return Ragged(
        Decoder(sizes, tile or ops.tile_of_decode(q, HEADS), bounds, "cuda"),
        Cache(kv, table.cuda()),
        q,
        torch.arange(batch * tokens, dtype=torch.int32, device="cuda").view(batch, tokens),
        torch.arange(batch, device="cuda"),
        torch.full((batch,), tokens, dtype=torch.int64, device="cuda"),
        [tokens if h < full_heads else WINDOW_ROWS for h in range(HEADS)] * batch,
    )


def captured(problem: Ragged, layers: int, *, plan: bool = True) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    outs = [torch.empty_like(problem.q) for _ in range(layers)]

    def step() -> None:
        if plan:
            problem.decoder.plan(problem.req_to_token, problem.rows, problem.lens)
        for layer, out in enumerate(outs):
            problem.decoder.attend(layer, problem.q, problem.cache, DIM**-0.5, 0.0, out)

    problem.decoder.plan(problem.req_to_token, problem.rows, problem.lens)
    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph, outs


def seconds_of(run: Callable[[], object], rounds: int = 20) -> float:
    """Median of single runs."""
    times = []
    for _ in range(rounds + 3):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return sorted(times[3:])[rounds // 2]


# ---- graph and bandwidth -----------------------------------------------------------------------------------


def graph() -> None:
    problem = ragged(4, 4096, 2, 2)
    recorded, outs = captured(problem, 2)
    worst = 0.0
    for lengths in ((4096, 4000, 3900, 4095), (4096, 4090, 4080, 4050), (4095, 4096, 0, 3000)):
        problem.lens.copy_(torch.tensor(lengths))
        problem.q.normal_()
        recorded.replay()
        pages = (problem.req_to_token[:, ::PAGE_ROWS] // PAGE_ROWS).to(torch.int32)
        for layer, out in enumerate(outs):
            wanted = torch.empty(out.shape, dtype=out.dtype)
            REF.attend_decode(
                problem.q.cpu(), Cache(problem.cache.kv.cpu(), problem.cache.table.cpu()), pages.cpu(),
                problem.lens.cpu().to(torch.int32), bounds_of(problem), layer * HEADS, HEADS, DIM**-0.5, 0.0,
                wanted,
            )  # fmt: skip
            worst = max(worst, triton_cases.off(out.cpu(), wanted))
    # shorter lengths look for rows before the windows that `ragged` made: they are holes, read by neither
    add("gpu_graph_worst_error_over_tolerance", f"{worst:.2f}")


def triggers() -> dict[str, float | str]:
    """The outcomes of cases that are wrong."""
    cases = {
        name: trigger_case.replays_select(case, "cuda") for name, case in trigger_case.CASES_BY_NAME.items()
    }
    wrong = wrong_of(cases)
    add("gpu_trigger_cases_wrong", f"{len(wrong)} of {len(cases)}")
    return wrong


def bounds_of(problem: Ragged) -> Bounds:
    plain = problem.decoder._plain
    return Bounds(plain.sink.cpu(), plain.recent.cpu())


def copy_speed(size_bytes: int) -> float:
    """Bytes read and written in a second."""
    source = torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size_bytes / seconds_of(lambda: target.copy_(source))


def bandwidth(quick: bool) -> None:
    copy = copy_speed(2 << 30)
    add("gpu_copy_gb_per_s", round(copy / 1e9))
    layers = 2 if quick else 4
    problem = ragged(32, 32_768, 2, layers)
    recorded, outs = captured(problem, layers)
    ours = seconds_of(recorded.replay) / layers
    add("gpu_decode_ragged_us_per_layer", round(ours * 1e6, 1))
    add("gpu_decode_ragged_of_floor", f"{problem.layer_bytes / copy / ours:.2f}")
    alone, _ = captured(problem, layers, plan=False)
    add("gpu_decode_plan_us_per_step", round((ours * layers - seconds_of(alone.replay)) * 1e6, 1))
    others(problem, outs[0], copy)
    chosen = ops.tile_of_decode(problem.q, HEADS)
    for rows, warps, stages in TILES:
        if late():
            break
        for blocks in (2, 3, 4):
            tile = replace(chosen, rows=rows, warps=warps, stages=stages, blocks=blocks)
            decoder = Decoder(problem.decoder.sizes, tile, problem.decoder._plain, "cuda")
            name = f"gpu_decode_ragged_of_floor_rows{rows}_warps{warps}_stages{stages}_blocks{blocks}"
            try:
                other, _ = captured(replace(problem, decoder=decoder), layers)
                ratio = problem.layer_bytes / copy / (seconds_of(other.replay, 7) / layers)
                add(name, f"{ratio:.2f}")
            except Exception as error:  # too much shared memory on this GPU
                add(name, f"failed: {type(error).__name__}")
    del problem, recorded, outs, alone
    torch.cuda.empty_cache()
    full = ragged(32, 32_768, HEADS, 1)
    recorded, _ = captured(full, 1)
    whole = seconds_of(recorded.replay)
    add("gpu_decode_full_us_per_layer", round(whole * 1e6, 1))
    add("gpu_decode_full_of_floor", f"{full.layer_bytes / copy / whole:.2f}")
    add("gpu_ragged_speed_up_over_full", f"{whole / ours:.2f}")
    others(full, None, copy, name="full")


def others(problem: Ragged, wanted: Tensor | None, copy: float, name: str = "ragged") -> None:
    """SGLang's kernel and FlashInfer's on the first layer's rows."""
    batch = problem.q.shape[0]
    q = problem.q.view(batch * HEADS, GROUP, DIM)
    tokens = problem.req_to_token.shape[1]
    table = problem.cache.table.view(batch, -1, problem.cache.table.shape[1])[:, :, :HEADS].transpose(1, 2)
    lanes = table.reshape(batch * HEADS, -1).cpu()  # head-pages of each lane; windows begin at a page
    pages = [lane[lane >= 0] for lane in lanes]
    counts = torch.tensor([len(p) for p in pages], dtype=torch.int32)
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).to(torch.int32)])
    flat = torch.cat(pages).cuda()
    slots = (flat[:, None].long() * PAGE_ROWS + torch.arange(PAGE_ROWS, device="cuda")).flatten()
    last = torch.full((len(pages),), PAGE_ROWS, dtype=torch.int32)
    assert tokens % PAGE_ROWS == 0
    kv, scale = problem.cache.kv, DIM**-0.5
    rivals: dict[str, Callable[[], tuple[Callable[[], object], Tensor]]] = {
        "sglang": lambda: sglang_decode(q, kv, (starts * PAGE_ROWS).cuda(), slots, scale),
        "flashinfer": lambda: flashinfer_decode(q, kv, starts, flat, last, scale),
    }
    for rival, make in rivals.items():
        if late():
            return
        try:
            launch, out = make()
            seconds = seconds_of(launch, 7)
        except Exception as error:
            add(f"gpu_{rival}_{name}", f"not run: {type(error).__name__}: {str(error)[:80]}")
            continue
        add(f"gpu_{rival}_{name}_us_per_layer", round(seconds * 1e6, 1))
        add(f"gpu_{rival}_{name}_of_floor", f"{problem.layer_bytes / copy / seconds:.2f}")
        if wanted is not None:
            worst = triton_cases.off(out.view_as(wanted).cpu(), wanted.cpu())
            add(f"gpu_{rival}_{name}_error_over_tolerance", f"{worst:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="two layers instead of four")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench: gpu = none: nothing was measured")
        return 2
    torch.manual_seed(0)
    add("gpu", torch.cuda.get_device_name())
    bandwidth(options.quick)
    graph()
    wrong_triggers = triggers()
    unequal = unequal_selections()
    add("gpu_selections_unequal", ", ".join(unequal) or "none")
    add("gpu_flashinfer_prefill", flashinfer_prefill())
    # each case compiles kernels of its own, so that many may not fit
    ran, wrong = run_on_gpu(late)
    for name, outcome in [*wrong_triggers.items(), *list(wrong.items())[:5]]:
        print(f"{name}: {outcome}", file=sys.stderr)
    add("gpu_cases", f"{ran} of {len(triton_cases.CASES)}")
    add("gpu_cases_wrong", len(wrong))
    add("gpu_check_seconds", round(time.monotonic() - STARTED))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))
    return 0 if figures["gpu_cases_wrong"] == 0 and not wrong_triggers and not unequal else 1


if __name__ == "__main__":
    raise SystemExit(main())
