"""The language and lowering in figures: time, bytes that can be checked by hand, what lowers, what is shown.

python -m bench.language
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from bench import fuzz_language, lowering
from kvir.lowering import footprint
from kvir.lowering.model_facts import facts_of, load_model
from kvir.lowering.pipeline import lower
from kvir.lowering.stages import LayoutPlan
from kvir.policy_ir import Policy, PolicyError, load, parse, read, render
from kvir.policy_ir.codes import codes
from kvir.policy_ir.schema import schema_text

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "tests/data/configs"
# every example lowers for one of these; the last stands for the four layers of a calibrated table
MODELS = (
    load_model(CONFIGS / "llama-3.1-8b"),
    load_model(CONFIGS / "smollm2-135m"),
    facts_of(
        {
            "model_type": "llama",
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": 131072,
        }
    ),
)
IMPORT = "import time; t = time.perf_counter(); import {0}; print(time.perf_counter() - t)"
REQUESTS, TOKENS = 32, 32_768
QUARTER = "kvir: 1\nname: quarter\nrules:\n  - keep: {recent: 1088}\n  - {heads: 0..1, keep: all}\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=20_000, help="for the fuzzer (%(default)s)")
    args = parser.parse_args()
    outcome = fuzz_language.run(args.texts, seed=1)
    figures = {
        "import_kvir_ms": import_ms("kvir"),
        "import_kvir_lowering_ms": import_ms("kvir.lowering.load"),
        **lowering.figures(),
        **by_hand(),
        **examples(),
        **findings(),
        "fuzz_texts": str(args.texts),
        "fuzz_slowest_s": f"{outcome.slowest_seconds:.2f}",
        "fuzz_failures": str(len(outcome.failures)),
    }
    for name, value in figures.items():
        print(f"bench: {name} = {value}")
    return 1 if outcome.failures else 0


def import_ms(module: str) -> str:
    """The best of five fresh processes."""
    times = [
        float(
            subprocess.run(
                [sys.executable, "-c", IMPORT.format(module)], capture_output=True, check=True
            ).stdout
        )
        for _ in range(5)
    ]
    return f"{min(times) * 1e3:.1f}"


def by_hand() -> dict[str, str]:
    """Bytes that arithmetic on paper gives too."""
    identity = Policy(kvir=1, name="identity")
    full, quarter = layout(identity, "llama-3.1-8b"), layout(parse(QUARTER), "llama-3.1-8b")
    hybrid = layout(identity, "qwen3.6-27b")
    return {
        "llama_8b_bytes_per_token": str(footprint.full_bytes(full, 16) // 16),
        "qwen_hybrid_bytes_per_token": str(footprint.full_bytes(hybrid, 16) // 16),
        "full_32x32k_gb": f"{REQUESTS * footprint.full_bytes(full, TOKENS) / 1e9:.1f}",
        "quarter_full_32x32k_gb": f"{REQUESTS * footprint.peak_bytes(quarter, TOKENS) / 1e9:.1f}",
    }


def examples() -> dict[str, str]:
    """How many examples lower, on a CPU and on a card."""
    paths = sorted((ROOT / "examples").rglob("*.ir"))
    return {
        "examples": str(len(paths)),
        "examples_lowered_cpu": str(sum(lowers(path, "cpu") for path in paths)),
        "examples_lowered_h200": str(sum(lowers(path, "h200") for path in paths)),
    }


def findings() -> dict[str, str]:
    """How many codes there are, how many a golden case shows, and what ten mistakes are told."""
    shown = {
        code
        for path in (ROOT / "tests/golden").glob("*.md")
        for code in re.findall(r"\[(KV\d{3})\]", path.read_text(encoding="utf-8"))
    }
    report = read((ROOT / "tests/data/policies/ten_mistakes.ir").read_bytes(), "ten_mistakes.ir").report
    return {
        "codes": str(len(codes())),
        "codes_with_golden_case": str(len(shown & set(codes()))),
        "ten_mistakes_reported": str(report.error_count),
        "ten_mistakes_columns": str(max(map(len, render.full(report, columns=80).splitlines()))),
        "schema_bytes": str(len(schema_text())),
    }


def layout(policy: Policy, model: str) -> LayoutPlan:
    return lower(policy, load_model(CONFIGS / model), dtype="bfloat16").layout


def lowers(path: Path, device: str) -> bool:
    """Whether a policy lowers for one of the models."""
    for model in MODELS:
        try:
            lower(load(path), model, dtype="bfloat16", device=device)
        except PolicyError:
            continue
        return True
    return False


if __name__ == "__main__":
    sys.exit(main())
