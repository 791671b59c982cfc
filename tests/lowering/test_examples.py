"""Every example parses, verifies, prints, reads back and lowers; static plans keep their bytes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from kvir.lowering import footprint, plan_file, spec
from kvir.lowering.device_facts import DEVICES
from kvir.lowering.pipeline import lower
from kvir.lowering.verify import verified_errors
from kvir.policy_ir import Report, Source, load, parse, print_policy
from support.examples import EXAMPLES, ROOT, model_of
from support.models import config_model

# the published methods and the papers that the language must be able to say, and the file of each
METHODS = {
    "SnapKV": "snapkv",
    "H2O": "h2o",
    "Scissorhands": "scissorhands",
    "StreamingLLM": "streamingllm",
    "TOVA": "tova",
    "PyramidKV": "pyramidkv",
    "CAKE": "cake",
    "AdaKV": "adakv",
    "HeadKV": "headkv",
    "R-KV": "rkv",
    "KeyDiff": "keydiff",
    "Expected Attention": "expected_attention",
    "look-ahead queries": "lookahead_query",
    "Knorm": "knorm",
    "VATP": "vatp",
    "random": "random",
    "LagKV": "lagkv",
    "leverage": "leverage",
    "non-causal attention": "noncausal",
    "Compactor": "compactor",
    "LaProx": "laprox",
    "DuoAttention": "duoattention",
    "HeadWiseKV": "headwisekv",
    "PolyKV": "polykv",
    "HARD-KV": "hardkv",
    "ChunkKV": "chunkkv",
    "CriticalKV": "criticalkv",
    "CurDKV": "cur",
    "CAP": "cap",
}


def test_every_method_has_its_file() -> None:
    assert set(METHODS.values()) <= {p.stem for p in (ROOT / "examples/methods").glob("*.ir")}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_goes_all_the_way(path: Path) -> None:
    policy, report = load(path), Report(Source(path.name, ""))
    assert verified_errors(policy) == []
    assert parse(print_policy(policy)) == policy
    plan = lower(policy, model_of(path), dtype="bfloat16")
    for device in ("h200", "cpu"):
        plan = lower(policy, model_of(path), dtype="bfloat16", device=device, report=report)
        assert [x for stage in spec.every_stage(plan) for x in spec.broken(stage)] == []
        assert plan_file.decode(plan_file.encode(plan), report) == plan
    assert len(report) == 0
    lengths = [1, 500, 4096, 65_536]
    peaks = [footprint.peak_pages(plan.layout, n) for n in lengths]
    done = [footprint.done_pages(plan.layout, n) for n in lengths]
    assert all(d.least <= d.most <= p for d, p in zip(done, peaks, strict=True))
    if path.stem not in ("identity", "rkv") and "hardkv" not in path.stem:  # these select in decode only
        assert done[-1].most < footprint.full_pages(plan.layout, 65_536)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_by_score_are_planned_on_every_device(device: str) -> None:
    plan = lower(
        load(ROOT / "examples/methods/adakv.ir"),
        config_model("llama-3.1-8b"),
        dtype="bfloat16",
        device=device,
    )
    ops = {choice.op: choice for choice in plan.choices}
    assert list(ops) == ["append", "attend_decode", "attend_extend", "score", "select", "compact"]
    assert all(choice.built for choice in plan.choices)
    assert bool(plan.buckets.decode) == (DEVICES[device].kind == "cuda")


# SHA-256 of what the plan says beside its version, as the first release of the format wrote it
STATIC = {
    ("methods/duoattention", "qwen3-8b"): "2c0e47a0ba02945e5c95783f15524122c5bb0a5d3ff8235735bd065c67f1419c",
    ("methods/headwisekv", "tiny-llama"): "c848857c455898e6f919f432124ed927ba49a2162478da75b0a8c4920e6f5388",
    ("identity", "gemma-3-4b"): "7a6a0d7b17ac202ef4be07418b74f66a5abd94bbe94b943a9d824617afa13403",
    ("identity", "llama-3.1-8b"): "5d5d20d3da3eb3aeb251e898908514be1e024038349c74ecc789b0b8c45e3847",
    ("identity", "qwen3-next-80b"): "ecb17549f747a0e4fababa99903a7823c91028cdad0f9ca739887e20687fcebe",
    ("layer_ramp", "smollm2-135m"): "307b708b21870f4bb230734db2b0ceec3ebebccc4138e5aec90aa3c4411e1eec",
    ("retrieval_heads", "smollm2-135m"): "93d4a951753883338eb30b42e9f39c794c2fff3d281a880c7e80aabfe7a7a0b8",
    ("streaming", "gemma-2-9b"): "9486807b4bf87254d070e1e2fba5a3d97ab0ca3c27b530afa5b89c77e8a1f09b",
    ("streaming", "llama-3.1-8b"): "9cfbd7c9c036974d369b53aaf289b9d49935715b87f7e3ec17e47a0200b4d104",
}


@pytest.mark.parametrize(("name", "model"), STATIC)
def test_static_plans_keep_their_bytes(name: str, model: str) -> None:
    """On every machine.  A change here changes the fingerprint of plans that people have."""
    plan = lower(load(ROOT / f"examples/{name}.ir"), config_model(model), dtype="bfloat16")
    body = msgspec.json.encode(msgspec.json.decode(plan_file.encode(plan))["buckets"])
    assert hashlib.sha256(body).hexdigest() == STATIC[name, model]
