"""The GPU kernels, as far as a machine without a GPU can tell.

    python -m bench.kernels [cases] [build] [makespan] [modelled] [--list]

cases: every kernel against the reference, in Triton's interpreter.  build: kernels of the models below for
sm_80, sm_90 and sm_100, by Triton's own compiler.  makespan: the work list on ragged batches, simulated.
modelled: time of decode steps from data sheets.  What only a GPU can tell is in `bench/gpu_check.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.parts.figures import Figures, run_parts, say
from bench.parts.makespan import RAGGED, flashinfer_items, item_rows, over_ideal, ragged_rows, slots_of
from bench.parts.modelled import decode_step, weight_bytes
from kvir.cli_build import facts_of
from kvir.kernels.catalog import decode_tile
from kvir.lowering.device_facts import DEVICES
from kvir.lowering.model_facts import load_model
from kvir.lowering.pipeline import lower
from kvir.lowering.stages import LayoutPlan
from kvir.policy_ir import parse

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests/data/configs"
MODELS = ("llama-3.1-8b", "qwen3-8b", "gemma-3-4b", "gemma-2-9b", "qwen3.6-27b")
CARDS = ("a100", "h100", "h200", "b200")
TARGETS = ("sm_80", "sm_90", "sm_100")
CASES = ("support.triton_cases", "support.triton_score_cases", "support.graph_case")
# a quarter of the heads keeps everything, the others 4 sinks and 1,084 recent rows
POLICY = "kvir: 1\nname: ragged\nrules:\n  - keep: [{sink: 4}, {recent: 1084}]\n"
STEPS = ((8, 32_768), (32, 8_192), (32, 32_768))  # requests, tokens


def layout_of(model: str, device: str, *, selects: bool = False) -> LayoutPlan:
    """A ragged plan; `selects`: with rows by score in one layer, so that their kernels are asked for too."""
    facts = load_model(CONFIGS / model)
    kv_heads = facts.layers[0].kv_heads
    text = POLICY + f"  - {{heads: 0..{max(1, kv_heads // 4) - 1}, keep: all}}\n"
    if selects:
        layer = next(layer for layer in facts.layers if layer.native_window_tokens is None)
        text += f"  - {{layers: {layer.layer_id}, preset: snapkv}}\n"
    policy = parse(text, "ragged.ir")
    return lower(policy, facts, dtype="bfloat16", device=device).layout


def cases(figures: Figures) -> None:
    worst, failed, count = 0.0, 0, 0
    for module in CASES:
        paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        command = [sys.executable, "-W", "ignore", "-m", module]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True)
        for name, outcome in json.loads(done.stdout).items():
            count += 1
            if isinstance(outcome, float) and outcome < 1:
                worst = max(worst, outcome)
            else:
                failed += 1
                say(f"{name}: {outcome}")
    figures.add("kernel_cases", count, ok=count >= 200)
    figures.add("kernel_cases_wrong", failed, ok=failed == 0)
    figures.add("kernel_worst_error_over_tolerance", f"{worst:.2f}")


def build(figures: Figures, target: str) -> None:
    from kvir.kernels.triton.build import build as compile_kernels

    card = next(name for name in CARDS if DEVICES[name].arch == target)
    for model in MODELS:
        facts = facts_of(layout_of(model, card, selects=True), target)
        with TemporaryDirectory() as folder:
            manifest = compile_kernels([facts], target, Path(folder))
        spilled = sum(1 for kernel in manifest.kernels if kernel.stack_bytes)
        decode = next(kernel for kernel in manifest.kernels if kernel.kernel == "decode_items")
        name = f"{model}_{target}".replace(".", "_").replace("-", "_")
        figures.add(f"{name}_kernels", len(manifest.kernels))
        figures.add(f"{name}_spilling", spilled, ok=spilled == 0)
        figures.add(f"{name}_decode_registers", decode.registers)
        figures.add(f"{name}_decode_shared_bytes", decode.shared_bytes)
        figures.add(f"{name}_decode_blocks", decode.blocks)
        figures.add(f"{name}_decode_async_loads", decode.async_loads, ok=decode.async_loads > 0)


def makespan(figures: Figures) -> None:
    tile = decode_tile(128, 4, "bfloat16")
    multiprocessors = DEVICES["h200"].multiprocessors or 0
    slots = slots_of(multiprocessors, tile)
    for batch, share in RAGGED:
        rows = ragged_rows(batch, share)
        ratio = over_ideal(item_rows(rows, slots, tile.rows), slots)
        asked = (batch, share) == (32, 0.25)
        case = f"{batch}_{round(100 * share)}"
        figures.add(f"makespan_over_ideal_simulated_{case}", f"{ratio:.2f}", ok=not asked or ratio <= 1.15)
        theirs = over_ideal(*flashinfer_items(rows, multiprocessors))
        figures.add(f"makespan_over_ideal_simulated_{case}_flashinfer", f"{theirs:.2f}")


def modelled(figures: Figures) -> None:
    for model in ("llama-3.1-8b", "qwen3-8b"):
        for card in CARDS:
            layout = layout_of(model, card)
            weights = weight_bytes(CONFIGS / model, layout.kv_heads, layout.head_dim)
            for batch, tokens in STEPS:
                step = decode_step(layout, DEVICES[card], weights, batch, tokens)
                name = f"modelled_{model}_{card}_{batch}x{tokens}".replace(".", "_").replace("-", "_")
                figures.add(
                    f"{name}_ms",
                    f"{step.modelled * 1e3:.2f} (floor {step.floor * 1e3:.2f}, "
                    f"full KV {step.full_floor * 1e3:.2f}, attention at "
                    f"{step.attention_floor / step.attention:.2f} of its floor)",
                )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help="default: all")
    parser.add_argument("--list", action="store_true", help="only name the parts")
    figures = Figures()
    available: dict[str, Callable[[], None]] = {
        "makespan": partial(makespan, figures),
        "modelled": partial(modelled, figures),
        "cases": partial(cases, figures),
        **{f"build:{target}": partial(build, figures, target) for target in TARGETS},
    }
    run_parts(parser, parser.parse_args(), available, figures)


if __name__ == "__main__":
    main()
