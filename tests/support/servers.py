"""The servers that tests use, by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from evaluation.server import Launch

ROOT = Path(__file__).parents[2]
POLICIES = ROOT / "tests/data/policies/tiny"
CHUNK_TOKENS = 256

# Freed head-pages are filled with NaN, attention outputs are searched for it, and every invariant is
# recounted after every step; SGLang's own leak checker runs whenever the server is idle.
CHECKS = {"KVIR_DEBUG": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
SUPPORT = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests", ROOT)))}
RETRACTIONS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}


def policy(name: str) -> Path:
    return POLICIES / f"{name}.ir"


@dataclass(frozen=True)
class Setup:
    policy_name: str  # "" is stock SGLang
    pool_tokens: int  # memory, as tokens of full KV
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    lowered: bool = False  # given as a plan instead of a policy
    stand_in: str = ""  # a module of `support` that starts SGLang with something replaced

    def launch(self, model: Path, plan_file: Callable[[str], Path]) -> Launch:
        kv_ir = None
        if self.policy_name:
            kv_ir = plan_file(self.policy_name) if self.lowered else policy(self.policy_name)
        return Launch(
            model=model,
            kv_ir=kv_ir,
            max_total_tokens=self.pool_tokens,
            chunked_prefill_tokens=CHUNK_TOKENS,
            arguments=self.arguments,
            environment={**CHECKS, **self.environment, **(SUPPORT if self.stand_in else {})},
            module=f"support.{self.stand_in}" if self.stand_in else "sglang.launch_server",
        )


# Triton's kernels in its interpreter instead of the plan's.
TRITON = {"KVIR_KERNELS": "triton", "TRITON_INTERPRET": "1"}

# The same, with a stand-in for FlashInfer where heads keep every row of a prompt.
FLASHINFER = {**TRITON, "KVIR_KERNELS": "flashinfer"}

# Rows are selected on what looks like another device.
ELSEWHERE = "elsewhere_server"

PLAIN = ("--disable-overlap-schedule",)

# Two ranks, a head of each layer on each; SGLang wants to be told the cores of each.
RANKS = ("--tp-size", "2")
CORES = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}

# Decode compiled by torch for batches of these sizes; others are padded, larger ones are not compiled.
GRAPHS = {"TORCH_LOGS": "graph_breaks"}
COMPILED = ("--enable-torch-compile", "--cuda-graph-bs-decode", "3", "8", "--decode-log-interval", "1")

# Pools are as small as lets eight long requests run at once, so that the prefix cache is under pressure.
SERVERS: Mapping[str, Setup] = {
    "stock": Setup("", 8192),
    "identity": Setup("identity", 8192),
    "stock-1024": Setup("", 1024),
    "tight": Setup("tight", 1024),
    "uniform": Setup("uniform", 4096),
    "table": Setup("table", 4096, ("--schedule-policy", "lpm")),
    "ramp": Setup("ramp", 4096),
    "narrow": Setup("narrow", 1024),
    "phased": Setup("phased", 4096),
    "methods": Setup("methods", 4096),
    "rivals": Setup("rivals", 4096, PLAIN),
    "accumulated": Setup("accumulated", 4096, stand_in=ELSEWHERE),
    "blocks": Setup("blocks", 4096),
    "blocks-retract": Setup("blocks", 4096, PLAIN, RETRACTIONS, stand_in=ELSEWHERE),
    "folding": Setup("folding", 4096),
    "folding-retract": Setup("folding", 4096, PLAIN, RETRACTIONS),
    "folding-compiled": Setup("folding", 4096, COMPILED, GRAPHS),
    "merging": Setup("merging", 4096),
    "merging-retract": Setup("merging", 4096, PLAIN, RETRACTIONS, stand_in=ELSEWHERE),
    "folding-ranks": Setup("folding", 4096, RANKS, CORES),
    "merging-ranks-retract": Setup("merging", 4096, (*RANKS, *PLAIN), {**CORES, **RETRACTIONS}),
    "rivals-retract": Setup("rivals", 4096, PLAIN, RETRACTIONS, stand_in=ELSEWHERE),
    "uniform-retract": Setup("uniform", 4096, PLAIN, RETRACTIONS),
    "table-retract": Setup("table", 4096, PLAIN, RETRACTIONS, lowered=True),
    "ramp-retract": Setup("ramp", 4096, PLAIN, RETRACTIONS),
    "triton-uniform": Setup("uniform", 2048, environment=TRITON),
    "triton-snapkv": Setup("snapkv", 2048, environment=TRITON),
    "triton-laprox": Setup("laprox", 2048, PLAIN, FLASHINFER, stand_in="flashinfer_server"),
    "triton-captured-retract": Setup("captured", 2048, PLAIN, {**TRITON, **RETRACTIONS}),
    "narrow-retract": Setup("narrow", 1024, PLAIN, RETRACTIONS),
}
