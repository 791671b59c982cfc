"""Cases of the Triton kernels against the reference.  `python -m support.triton_cases` runs them all in
Triton's interpreter, which must be on before Triton is imported, and prints what came out as JSON.
"""

from __future__ import annotations

import json
import random
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kvir.kernels.ops import FULL, Bounds, Cache
from kvir.kernels.ref.ops import KERNELS as REF
from support.kernel_cases import Problem, Shape, decode, error, extend, make, ones

FLOAT, BF16, HALF = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {FLOAT: 1e-5, HALF: 2e-3, BF16: 1.6e-2}  # relative to values above 1
SHORT = ((0, 1), (4, 8), (20, 16))
MIXED = ((0, FULL), (4, 17), (20, 100))
RANDOM_CASES = 50

DECODE = [
    # page edges; length 1
    *(Shape(ones(n), MIXED, 3, seed=n) for n in (1, 2, 15, 16, 17, 31, 32, 33)),
    # windows that are shorter than a page, with and without sinks, in groups of every size
    *(Shape(ones(40, 7), SHORT, g) for g in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)),
    *(Shape(ones(70, 1), MIXED, g, d) for g, d in ((1, 64), (5, 72), (7, 8), (16, 96), (2, 128), (6, 256))),
    *(Shape(ones(70, 20), ((w, w + 3), (0, w)), 2) for w in (1, 15, 16, 17)),
    # pages of other sizes
    *(Shape(ones(100, 33), MIXED, 3, 64, p) for p in (1, 3, 64, 1000)),
    # several items to a lane, and lanes that end where an item does
    *(Shape(ones(n), ((0, FULL), (0, 8), (4, 1)), 3, seed=n) for n in (127, 128, 129, 256, 385)),
    # one huge head among tiny ones
    Shape(ones(1500, 3, 30), ((4, 4), (0, FULL)), 4),
    Shape(ones(900, 3, 255, 16), ((4, 12), (0, FULL), (2, 1)), 3),
    # more lanes than blocks, and fewer
    Shape(ones(*range(1, 20)), ((0, FULL), (4, 5)), 2),
    Shape(ones(700), ((0, FULL),), 8, 128),
    # the rest
    *(Shape(ones(150, 31), MIXED, g, d, logit_cap=30.0) for g, d in ((3, 64), (4, 72))),
    *(Shape(ones(150, 31), MIXED, g, d, strided=True) for g, d in ((3, 64), (1, 128))),
    *(Shape(ones(150, 17, 1), MIXED, g, d, dtype=t, seed=d) for t in (BF16, HALF)
      for g, d in ((3, 64), (4, 128), (1, 80), (2, 256))),
]  # fmt: skip

EXTEND = [
    *(Shape(((0, n),), MIXED, 3, seed=n) for n in (1, 15, 16, 17, 65)),
    *(Shape(((p, n),), MIXED, 3, seed=n) for p in (1, 15, 16, 33, 100) for n in (1, 16, 33)),
    *(Shape(((20, 40), (0, 7), (3, 20)), SHORT, g) for g in (1, 2, 4, 8)),
    Shape(((20, 9), (0, 7)), SHORT, 16),
    *(Shape(((70, 9), (0, 25)), MIXED, g, d) for g, d in ((2, 96), (5, 72), (7, 8), (3, 128), (2, 256))),
    *(Shape(((50, 20), (33, 10)), MIXED, 3, 64, p) for p in (1, 3, 64)),
    *(Shape(((100, 90),), ((0, w), (4, w), (20, w)), 2) for w in (1, 16, 17, 99, 200)),
    Shape(((300, 30), (0, 3), (90, 0), (5, 1)), ((20, 100), (0, FULL), (4, 213)), 1),
    *(Shape(((60, 30), (0, 11)), MIXED, g, d, logit_cap=30.0) for g, d in ((3, 64), (4, 72))),
    Shape(((60, 30), (0, 11)), MIXED, 3, strided=True),
    *(Shape(((60, 30), (0, 17), (31, 1)), MIXED, g, d, dtype=t, seed=d) for t in (BF16, HALF)
      for g, d in ((3, 64), (4, 128), (1, 80))),
]  # fmt: skip


def random_shape(seed: int) -> Shape:
    """Anything that the contract allows."""
    rng = random.Random(seed)

    def window() -> tuple[int, int]:
        return rng.choice((0, 0, 1, 4, 16, 40)), rng.choice((0, 1, 7, 16, 50, 130, FULL))

    def length(least: int) -> int:
        return rng.choice((least, 1, 16, 17, rng.randint(1, 40), rng.randint(1, 300)))

    chunks = seed % 3 == 0
    requests = ones(*(length(1) for _ in range(rng.randint(1, 4))))
    if chunks:
        requests = tuple((rng.choice((0, length(0))), length(0) % 60) for _ in range(rng.randint(1, 3)))
        requests = (*requests, (rng.randint(0, 50), 5))
    return Shape(
        requests,
        tuple(window() for _ in range(rng.randint(1, 3))),
        rng.randint(1, 16),
        rng.choice((64, 64, 80, 96, 128, 256)),
        rng.choice((16, 16, 16, 8, 1)),
        rng.choice((FLOAT, FLOAT, HALF, BF16)),
        rng.choice((0.0, 0.0, 20.0)),
        rng.random() < 0.3,
        seed,
    )


def off(got: Tensor, wanted: Tensor) -> float:
    """The error over what is allowed."""
    largest = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    return error(got, wanted) / (TOLERANCE[got.dtype] * largest)


def decode_case(shape: Shape) -> float:
    from kvir.kernels.triton.ops import KERNELS

    problem = make(shape, chunk_in_cache=True)
    got, holes = decode(KERNELS, problem)
    assert holes == 0
    return off(got, decode(REF, problem)[0])


def extend_case(shape: Shape) -> float:
    from kvir.kernels.triton.ops import KERNELS

    problem = make(shape, chunk_in_cache=False)
    got, holes = extend(KERNELS, problem)
    assert holes == 0
    return off(got, extend(REF, problem)[0])


def random_case(seed: int) -> float:
    shape = random_shape(seed)
    return extend_case(shape) if seed % 3 == 0 else decode_case(shape)


def own_bounds() -> float:
    """A compacted request has bounds of its own: compact rows are its sinks, later ones its window."""
    from kvir.kernels.triton.ops import KERNELS

    problem = make(Shape(((189, 1), (30, 1), (80, 1)), ((0, FULL),) * 3, 3), chunk_in_cache=True)
    units = problem.bounds.sink.shape[0]
    generator = torch.Generator().manual_seed(7)
    own = Bounds(
        torch.randint(0, 40, (3, units), generator=generator, dtype=torch.int32),
        torch.randint(1, 60, (3, units), generator=generator, dtype=torch.int32),
    )
    problem = replace(problem, bounds=own)
    return off(decode(KERNELS, problem)[0], decode(REF, problem)[0])


def bias(dtype: torch.dtype) -> float:
    """Rows that stand for several add the logarithm of their number to their logits."""
    from kvir.kernels.triton.ops import KERNELS

    problem = make(Shape(ones(200, 31), MIXED, 4, dtype=dtype), chunk_in_cache=True)
    extra = torch.randint(1, 9, (problem.cache.kv.shape[0], 16)).float().log()
    problem = replace(problem, cache=replace(problem.cache, bias=extra))
    wanted = decode(REF, problem)[0]
    assert off(wanted, decode(REF, replace(problem, cache=replace(problem.cache, bias=None)))[0]) > 10
    return off(decode(KERNELS, problem)[0], wanted)


def punch(problem: Problem, entries: list[tuple[int, int, int, int]]) -> Problem:
    """The problem with table entries (request, page index, head, value) overwritten."""
    table = problem.cache.table.clone()
    for request, index, head, value in entries:
        table[problem.pages[request, index], problem.unit0 + head] = value
    return replace(problem, cache=Cache(problem.cache.kv, table))


def holes_of_decode() -> float:
    from kvir.kernels.triton.ops import KERNELS

    problem = make(Shape(ones(100, 600), ((0, FULL), (4, 20)), 2), chunk_in_cache=True)
    entries = [(0, 2, 0, -1), (0, 6, 0, -1), (0, 0, 1, -1), (1, 30, 0, 10**9), (1, 36, 1, -1), (1, 37, 1, -5)]
    holed = punch(problem, entries)
    got, holes = decode(KERNELS, holed)
    assert holes == 16 + 4 + 4 + 16 + 12 + 8
    wrong = replace(problem, pages=problem.pages[:, :5].contiguous())
    assert decode(KERNELS, wrong)[1] == decode(REF, wrong)[1] > 0
    return off(got, decode(REF, holed)[0])


def holes_of_extend() -> float:
    from kvir.kernels.triton.ops import KERNELS

    problem = make(Shape(((100, 150), (200, 9)), ((0, FULL), (4, 20)), 2), chunk_in_cache=False)
    holed = punch(problem, [(0, 2, 0, -1), (0, 0, 1, -1), (1, 11, 1, -1), (1, 12, 1, 10**9), (1, 3, 0, -7)])
    got, holes = extend(KERNELS, holed)
    assert holes == 16 + 4 + 11 + 8 + 16
    return off(got, extend(REF, holed)[0])


def nothing_to_see() -> float:
    """Requests of length 0, units that keep nothing: zeros, not NaN."""
    from kvir.kernels.triton.ops import KERNELS

    problem = make(Shape(ones(40, 20), ((0, FULL), (0, 0)), 2), chunk_in_cache=True)
    out = torch.full_like(problem.q, torch.nan)
    lens = torch.tensor([40, 0], dtype=torch.int32)
    holes = KERNELS.attend_decode(
        problem.q, problem.cache, problem.pages, lens, problem.bounds, problem.unit0, 2, 0.1, 0.0, out
    )
    assert holes == 0
    assert (out[0, :2] != 0).all()
    assert (out[0, 2:] == 0).all()
    chunk = make(Shape(((40, 5), (7, 0), (3, 2)), ((0, FULL), (0, 0)), 2), chunk_in_cache=False)
    got, _ = extend(KERNELS, chunk)
    assert (got[:, 2:] == 0).all()
    return max(off(out[1], torch.zeros_like(out[1])), off(got, extend(REF, chunk)[0]))


def poison(dtype: torch.dtype) -> float:
    """NaN in a row that is seen reaches the output."""
    from kvir.kernels.triton.ops import KERNELS

    problem = make(Shape(ones(300), ((0, FULL),), 3, dtype=dtype), chunk_in_cache=True)
    problem.cache.kv[problem.cache.table[problem.pages[0, 9], problem.unit0], 0, 5] = torch.nan
    assert decode(KERNELS, problem)[0].isnan().all()
    chunk = make(Shape(((30, 9),), ((0, FULL),), 3, dtype=dtype), chunk_in_cache=False)
    chunk.cache.kv[chunk.cache.table[chunk.pages[0, 1], chunk.unit0], 0, 5] = torch.nan
    assert extend(KERNELS, chunk)[0].isnan().all()
    return 0.0


CASES: dict[str, Callable[[], float]] = {
    **{f"decode-{shape}": (lambda s=shape: decode_case(s)) for shape in DECODE},
    **{f"extend-{shape}": (lambda s=shape: extend_case(s)) for shape in EXTEND},
    **{f"random-{seed}": (lambda s=seed: random_case(s)) for seed in range(RANDOM_CASES)},
    "own-bounds": own_bounds,
    **{f"bias-{dtype}": (lambda t=dtype: bias(t)) for dtype in (FLOAT, HALF, BF16)},
    "holes-decode": holes_of_decode,
    "holes-extend": holes_of_extend,
    "nothing-to-see": nothing_to_see,
    **{f"poison-{dtype}": (lambda t=dtype: poison(t)) for dtype in (FLOAT, BF16)},
}


def run(cases: dict[str, Callable[[], float]]) -> dict[str, float | str]:
    """The error of each case over what is allowed, or a traceback."""
    torch.set_num_threads(1)
    found: dict[str, float | str] = {}
    for name, case in cases.items():
        try:
            found[name] = case()
        except Exception:
            found[name] = traceback.format_exc()
    return found


if __name__ == "__main__":
    json.dump(run(CASES), sys.stdout)
