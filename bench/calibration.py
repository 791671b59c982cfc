"""SeqCalib on SmolLM2: the shares of the rows that it keeps, how long it takes, and in how much memory.

    python -m bench.calibration

Kept shares: 2 x 2,048 tokens of raw WikiText-2, windows 64..1024, every eighth query position of the last
quarter, float32.  Time: 2 x 4,096 tokens, 256 query positions, one threshold; half that context beside it.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from time import perf_counter, process_time

from evaluation.models import model_path
from kvir.calibration.candidates import codebook
from kvir.calibration.harness import Harness
from kvir.calibration.job import quiet
from kvir.calibration.memo import Memo
from kvir.calibration.samples import Sample, pieces, query_positions, token_ids
from kvir.calibration.seqcalib import Matrix, at_least, matrix

TEXT = Path(__file__).resolve().parents[1] / "data/wikitext2_head.txt"
WINDOWS = (64, 128, 256, 512, 1024)
SAMPLES = 2


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Bench:
    def __init__(self) -> None:
        quiet()
        self.harness = Harness(model_path("smollm2"))
        self.ids = token_ids(self.harness, TEXT.read_text(encoding="utf-8"))

    def run(self, context: int, sinks: int, tau: float, stride: int, memo: Memo) -> Matrix:
        positions = query_positions(context, 0.25, stride)
        samples = [Sample(ids, positions) for ids in pieces(self.harness, self.ids, context, SAMPLES)]
        codes = codebook(WINDOWS, (sinks,), context)
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            layers = len(self.harness.configurable)
            print(f"\r{context} tokens, tau {tau}: {done}/{SAMPLES * layers}", end="", file=sys.stderr)

        found = matrix(self.harness, samples, codes, at_least(tau), memo, step)
        print(file=sys.stderr)
        return found


def main() -> None:
    bench = Bench()
    loaded = peak_bytes()
    seconds: dict[int, float] = {}
    processor: dict[int, float] = {}
    for context in (2048, 4096):  # 256 query positions either way
        start = perf_counter(), process_time()
        bench.run(context, 4, 0.98, context // 4 // 256, Memo(None, {}))
        seconds[context], processor[context] = perf_counter() - start[0], process_time() - start[1]
    print(f"bench: seqcalib_seconds_2x4096 = {seconds[4096]:.1f}")
    print(f"bench: seqcalib_processor_seconds_2x4096 = {processor[4096]:.1f}")
    print(f"bench: seqcalib_seconds_per_doubled_context = {processor[4096] / processor[2048]:.2f}")
    print(f"bench: seqcalib_mib_above_model = {(peak_bytes() - loaded) >> 20}")
    for sinks in (0, 4):
        codes, memo = codebook(WINDOWS, (sinks,), 2048), Memo(None, {})
        for tau in (0.98, 0.995):
            found = bench.run(2048, sinks, tau, 8, memo)
            kept = [codes[k].rows(2048) for row in found.choices for k in row]
            name = f"kept_sinks{sinks}_tau{f'{tau:g}'[2:]}"
            print(f"bench: {name} = {sum(kept) / len(kept) / 2048:.4f}")


if __name__ == "__main__":
    main()
