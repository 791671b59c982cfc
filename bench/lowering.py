"""How long lowering takes: 80 layers x 8 KV heads, each head with its own window (640 residency classes).

python -m bench.lowering
"""

from __future__ import annotations

from statistics import median
from time import perf_counter

from kvir.lowering import plan_file
from kvir.lowering.model_facts import facts_of
from kvir.lowering.pipeline import lower
from kvir.policy_ir import Policy, Report, Source, parse, print_policy
from kvir.policy_ir.nodes import Windows

LAYERS, KV_HEADS, ROUNDS = 80, 8, 20
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": KV_HEADS,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}


def milliseconds(seconds: list[float]) -> str:
    return f"{median(seconds) * 1e3:.2f}"


def main() -> None:
    for name, value in figures().items():
        print(f"bench: {name} = {value}")


def figures() -> dict[str, str]:
    """Medians in milliseconds, and the size of the plan."""
    table = tuple(tuple(17 + 16 * (KV_HEADS * i + h) for h in range(KV_HEADS)) for i in range(LAYERS))
    policy = Policy(kvir=1, name="every-head", windows=Windows(table=table, sink=4))
    text, model = print_policy(policy), facts_of(CONFIG)
    parsing, lowering, loading, data = [], [], [], b""
    for _ in range(ROUNDS):
        start = perf_counter()
        parsed = parse(text)
        parsing.append(perf_counter() - start)
        start = perf_counter()
        plan = lower(parsed, model, dtype="bfloat16")
        lowering.append(perf_counter() - start)
        data = plan_file.encode(plan)
        start = perf_counter()
        loaded = plan_file.decode(data, Report(Source("plan.json", "")))
        loading.append(perf_counter() - start)
        assert parsed == policy
        assert loaded == plan
    return {
        "parse_80x8_ms": milliseconds(parsing),
        "lower_80x8_ms": milliseconds(lowering),
        "load_80x8_ms": milliseconds(loading),
        "plan_80x8_bytes": str(len(data)),
    }


if __name__ == "__main__":
    main()
