"""What the compiled kernels promise beyond the right answer, on every instruction set of this machine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvir.kernels.cpu import ops as cpu
from kvir.kernels.ops import FULL, Bounds, Cache
from kvir.kernels.ref.ops import KERNELS as REF
from support.kernel_cases import Problem, Shape, close, decode, extend, make, ones

FLOAT, BF16 = torch.float32, torch.bfloat16
FULL_ONLY = ((0, FULL),)


def punch(problem: Problem, entries: list[tuple[int, int, int, int]]) -> Problem:
    """The problem with table entries (request, page index, head, value) overwritten."""
    table = problem.cache.table.clone()
    for request, index, head, value in entries:
        table[problem.pages[request, index], problem.unit0 + head] = value
    return replace(problem, cache=Cache(problem.cache.kv, table))


def test_decode_counts_holes_and_does_not_read_them(isa: str) -> None:
    problem = make(Shape(ones(100, 600), ((0, FULL), (4, 20)), 2), chunk_in_cache=True)
    # of the first request a whole page, the 4 rows of the last page, the sinks of the other head;
    # of the second a page that leads past the pool, and one whole window
    first = [(0, 2, 0, -1), (0, 6, 0, -1), (0, 0, 1, -1)]
    holed = punch(problem, [*first, (1, 30, 0, 10**9), (1, 36, 1, -1), (1, 37, 1, -5)])
    wanted, count = decode(REF, holed)
    assert count == 16 + 4 + 4 + 16 + 12 + 8
    got, holes = decode(cpu.KERNELS, holed)
    assert holes == count
    assert close(got, wanted)


def test_extend_counts_each_hole_once(isa: str) -> None:
    problem = make(Shape(((100, 150), (200, 9)), ((0, FULL), (4, 20)), 2), chunk_in_cache=False)
    # the second chunk's window reaches back to row 181: 11 rows of page 11, the 8 cached rows of page 12
    holed = punch(problem, [(0, 2, 0, -1), (0, 0, 1, -1), (1, 11, 1, -1), (1, 12, 1, 10**9), (1, 3, 0, -7)])
    wanted, count = extend(REF, holed)
    assert count == 16 + 4 + 11 + 8 + 16
    got, holes = extend(cpu.KERNELS, holed)
    assert holes == count
    assert close(got, wanted)


def test_a_page_list_that_is_too_short_or_wrong_is_a_hole(isa: str) -> None:
    problem = make(Shape(ones(100), FULL_ONLY, 2), chunk_in_cache=True)
    short = replace(problem, pages=problem.pages[:, :5].contiguous())
    assert decode(REF, short)[1] == 20
    assert decode(cpu.KERNELS, short)[1] == 20
    wrong = replace(problem, pages=problem.pages.clone())
    wrong.pages[0, 1], wrong.pages[0, 2] = -1, 10**6
    assert decode(REF, wrong)[1] == 32
    assert decode(cpu.KERNELS, wrong)[1] == 32


def test_poison_in_a_visible_row_reaches_the_output(isa: str) -> None:
    # NaN keys must not be laundered into zero weights: the isnan check of the runtime counts on it
    for dtype in (FLOAT, BF16):
        problem = make(Shape(ones(300), FULL_ONLY, 3, dtype=dtype), chunk_in_cache=True)
        problem.cache.kv[problem.cache.table[problem.pages[0, 9], problem.unit0], 0, 5] = torch.nan
        assert decode(cpu.KERNELS, problem)[0].isnan().all()
        chunk = make(Shape(((300, 9),), FULL_ONLY, 3, dtype=dtype), chunk_in_cache=False)
        chunk.cache.kv[chunk.cache.table[chunk.pages[0, 9], chunk.unit0], 0, 5] = torch.nan
        assert extend(cpu.KERNELS, chunk)[0].isnan().all()


def test_empty_requests_and_blind_queries_get_zeros(isa: str) -> None:
    problem = make(Shape(ones(40, 20), ((0, FULL), (0, 0)), 2), chunk_in_cache=True)
    out = torch.full_like(problem.q, torch.nan)
    lens = torch.tensor([40, 0], dtype=torch.int32)
    holes = cpu.KERNELS.attend_decode(
        problem.q, problem.cache, problem.pages, lens, problem.bounds, problem.unit0, 2, 0.1, 0.0, out
    )
    assert holes == 0
    assert (out[0, :2] != 0).all()
    assert (out[0, 2:] == 0).all()
    assert (out[1] == 0).all()
    chunk = make(Shape(((40, 5), (7, 0), (3, 2)), ((0, FULL), (0, 0)), 2), chunk_in_cache=False)
    got, holes = extend(cpu.KERNELS, chunk)
    assert holes == 0
    assert close(got, extend(REF, chunk)[0])
    assert (got[:, 2:] == 0).all()


@pytest.mark.parametrize("dtype", [FLOAT, BF16], ids=str)
def test_results_depend_on_neither_threads_nor_pool_nor_batch(dtype: torch.dtype, isa: str) -> None:
    requests = (700, 3, 255, 1290)
    windows = ((20, 300), (0, FULL), (4, 513))
    together = make(Shape(ones(*requests), windows, 3, dtype=dtype), chunk_in_cache=True)
    chunks = make(Shape(((100, 150), (2300, 3), (500, 200)), windows, 3, dtype=dtype), chunk_in_cache=False)
    threads = torch.get_num_threads()
    decoded, extended = [], []
    try:
        for count, torchs in ((1, True), (2, True), (3, True), (2, False), (5, False)):
            torch.set_num_threads(count)
            cpu.use_torch_threads(torchs)
            decoded.append(decode(cpu.KERNELS, together)[0])
            extended.append(extend(cpu.KERNELS, chunks)[0])
    finally:
        torch.set_num_threads(threads)
        cpu.use_torch_threads()
    assert all(torch.equal(x, decoded[0]) for x in decoded)
    assert all(torch.equal(x, extended[0]) for x in extended)
    for b in range(len(requests)):
        alone = torch.empty_like(together.q[b : b + 1])
        cpu.KERNELS.attend_decode(
            together.q[b : b + 1], together.cache, together.pages[b : b + 1], together.lens[b : b + 1],
            together.bounds, together.unit0, together.kv_heads, together.scale, 0.0, alone,
        )  # fmt: skip
        assert torch.equal(alone[0], decoded[0][b])
    for b, tokens in enumerate((slice(0, 150), slice(150, 153), slice(153, 353))):
        alone = torch.empty_like(chunks.q[tokens])
        one = slice(b, b + 1)
        cpu.KERNELS.attend_extend(
            chunks.q[tokens], chunks.k_new[tokens], chunks.v_new[tokens], chunks.cache, chunks.pages[one],
            chunks.prefix_lens[one], chunks.extend_lens[one], chunks.bounds, chunks.unit0, chunks.scale, 0.0,
            alone,
        )  # fmt: skip
        assert torch.equal(alone, extended[0][tokens])


def test_torch_lends_its_threads() -> None:
    assert cpu.use_torch_threads()


OUTSIDE: dict[str, dict[str, object]] = {
    "dtype": {"q": torch.zeros(1, 2, 64, dtype=torch.float64)},
    "stride": {"q": torch.zeros(1, 64, 2).transpose(1, 2)},
    "head size": {"q": torch.zeros(1, 2, 32)},
    "head size 12": {
        "q": torch.zeros(1, 2, 12),
        "cache": Cache(torch.zeros(4, 2, 16, 12), torch.zeros(4, 3, dtype=torch.int32)),
    },
    "lens": {"lens": torch.ones(1, dtype=torch.int64)},
    "batch": {"pages": torch.zeros(2, 4, dtype=torch.int32)},
    "units": {"unit0": 3},
    "bounds": {"bounds": Bounds(torch.zeros(3), torch.zeros(3))},
    "pool": {"cache": Cache(torch.zeros(4, 2, 64, 16).transpose(2, 3), torch.zeros(4, 3, dtype=torch.int32))},
    "scale": {"scale": 0.0},
}


@pytest.mark.parametrize("change", OUTSIDE.values(), ids=OUTSIDE.keys())
def test_arguments_outside_the_contract_are_refused(change: dict[str, object]) -> None:
    arguments: dict[str, object] = {
        "q": torch.zeros(1, 2, 64),
        "cache": Cache(torch.zeros(4, 2, 16, 64), torch.zeros(4, 3, dtype=torch.int32)),
        "pages": torch.zeros(1, 4, dtype=torch.int32),
        "lens": torch.ones(1, dtype=torch.int32),
        "bounds": Bounds(torch.zeros(3, dtype=torch.int32), torch.full((3,), FULL, dtype=torch.int32)),
        "unit0": 1,
        "kv_heads": 2,
        "scale": 0.125,
        "logit_cap": 0.0,
    }
    arguments |= change
    with pytest.raises(ValueError, match="do not fit the contract"):
        cpu.KERNELS.attend_decode(**arguments, out=torch.zeros_like(arguments["q"]))  # type: ignore[arg-type]
