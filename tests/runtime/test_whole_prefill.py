"""When FlashInfer takes part in a prefill: where a plan says so, and it is there and right."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvir.kernels import dispatch
from kvir.kernels.flashinfer import prefill
from kvir.lowering.pipeline import lower
from kvir.policy_ir import parse
from kvir.sglang_ext.whole_prefill import WholePrefill, flashinfer_layers
from support import flashinfer_standin
from support.models import config_model

RULES = {
    "all": "{keep: all}",
    "windows": "{keep: [{sink: 4}, {recent: 64}]}",
    "selected at the end": "{keep: [{recent: 16}, {top_k: {tokens: 64, by: key_norm}}]}",
    "in blocks": "{keep: {top_k: {tokens: 9, by: key_norm}}, trigger: {prefill_chunk: {tokens: 64}}}",
    "windows in layer 1": "{layers: 1, keep: [{recent: 64}]}",
}


def pool_of(rule: str) -> Any:
    policy = parse(f"kvir: 1\nname: p\nrules: [{RULES[rule]}]\n")
    plan = lower(policy, config_model("llama-3.1-8b"), dtype="bfloat16", device="h200")
    kv = torch.zeros(1, dtype=torch.bfloat16)
    return SimpleNamespace(plan=plan, own=plan.layout, kv=kv, bias=None)


@pytest.fixture(autouse=True)
def _plain_torch_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    ref = dispatch.get("ref")
    monkeypatch.setattr(dispatch, "get", lambda name: ref)


@pytest.mark.parametrize(
    ("rule", "layers"),
    [
        ("all", range(32)),
        ("windows", ()),
        ("selected at the end", range(32)),
        ("in blocks", ()),
        ("windows in layer 1", (0, *range(2, 32))),
    ],
)
def test_layers_whose_heads_keep_every_row_while_a_prompt_is_read(
    rule: str, layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "library", lambda: flashinfer_standin)
    found = WholePrefill.of(pool_of(rule))
    assert (found.layers if found is not None else frozenset()) == frozenset(layers)
    monkeypatch.setenv("KVIR_KERNELS", "triton")
    assert not flashinfer_layers(pool_of(rule).plan)


def fails(*_arguments: Any, **_keywords: Any) -> Any:
    raise OSError("nvcc is missing")


BROKEN = {
    "differs by": {"merge_state": lambda a, s, b, t: (a, s)},
    "nvcc is missing": {"merge_state": fails},
    "has no attribute": {"BatchPrefillWithRaggedKVCacheWrapper": None},
}


@pytest.mark.parametrize("reason", BROKEN)
def test_one_that_is_wrong_or_cannot_run_leaves_prefill_to_triton(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parts = {**vars(flashinfer_standin), **BROKEN[reason]}
    broken = SimpleNamespace(**{name: part for name, part in parts.items() if part is not None})
    monkeypatch.setattr(prefill, "library", lambda: broken)
    with caplog.at_level(logging.WARNING):
        assert WholePrefill.of(pool_of("all")) is None
    assert "prefill by Triton" in caplog.text
    assert reason in caplog.text


def test_where_it_is_not_installed_triton_does_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> Any:
        raise ImportError("No module named 'flashinfer'")

    monkeypatch.setattr(prefill, "library", missing)
    with caplog.at_level(logging.WARNING):
        assert WholePrefill.of(pool_of("all")) is None
    assert "No module named" in caplog.text
