"""The plan's decode graphs in SGLang's own configuration, and the names of cards."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig

from kvir.lowering.device_facts import DEVICES, card_named
from kvir.lowering.pipeline import lower
from kvir.lowering.stages import ExecutionPlan
from kvir.policy_ir import parse
from kvir.policy_ir.nodes import Policy
from kvir.sglang_ext.graphs import declare_graphs, graphs_of
from support.models import config_model

POLICY = parse("kvir: 1\nname: p\nrules: [{keep: [{sink: 4}, {recent: 1024}]}]\n")

ON_DEVICE = (
    "{keep: [{recent: 9}, {top_k: {tokens: 64, by: last_query}}], trigger: {every: 32}, region: generated}"
)


def plan(device: str, policy: Policy = POLICY) -> ExecutionPlan:
    return lower(policy, config_model("llama-3.1-8b"), dtype="bfloat16", device=device)


def resolved(max_bs: int, backend: str = Backend.FULL) -> CudaGraphConfig:
    """What SGLang made of its arguments."""
    return CudaGraphConfig(
        decode=PhaseConfig(backend=backend, max_bs=max_bs, bs=[1, max_bs]),
        prefill=PhaseConfig(backend=Backend.BREAKABLE, bs=[64, 128]),
    )


def test_decode_is_captured_for_the_batches_of_the_plan_that_sglang_has_memory_for() -> None:
    found = graphs_of(resolved(44), plan("h200"), own_list=False)
    assert found.decode.bs == [1, 2, 4, 8, 12, 16, 24, 32, 40]
    assert found.decode.max_bs == 40
    assert found.decode.backend == Backend.FULL
    assert found.prefill.backend == Backend.DISABLED


def test_what_the_user_asked_for_stands() -> None:
    found = graphs_of(resolved(44), plan("h200"), own_list=True)
    assert (found.decode.bs, found.decode.max_bs) == ([1, 44], 44)
    off = graphs_of(resolved(44, Backend.DISABLED), plan("h200"), own_list=False)
    assert (off.decode.backend, off.decode.bs) == (Backend.DISABLED, [1, 44])


@pytest.mark.parametrize(
    ("rule", "ranks", "captured"),
    [
        ("{keep: {top_k: {tokens: 64, by: {laprox: {window: 8}}}}}", 1, True),  # the prompt alone
        (ON_DEVICE, 1, True),
        (ON_DEVICE, 2, False),
        ("{keep: {top_k: {tokens: 64, by: {laprox: {window: 8}}}}, trigger: {every: 32}}", 1, False),
    ],
)
def test_steps_in_which_the_host_chooses_rows_are_not_captured(rule: str, ranks: int, captured: bool) -> None:
    """A graph that is replayed would leave the choice out."""
    policy = parse(f"kvir: 1\nname: p\nrules: [{rule}]\n")
    found = graphs_of(resolved(44), plan("h200", policy), own_list=False, ranks=ranks)
    assert found.decode.backend == (Backend.FULL if captured else Backend.DISABLED)


def test_they_are_declared_as_sglang_reads_them_and_a_cpu_has_none() -> None:
    args = SimpleNamespace(_cuda_graph_config_locked={("decode", "backend")})
    config = SimpleNamespace(cuda_graph_config=resolved(16), tp_size=1)
    declare_graphs(args, config, plan("cpu"))
    assert not hasattr(args, "_resolved_overrides")
    declare_graphs(args, config, plan("b200"))
    ((source, fields),) = args._resolved_overrides
    assert source == "kvir"
    assert fields["cuda_graph_config"].decode.bs == [1, 2, 4, 8, 12, 16]


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 4090", "cuda"),
    ],
)
def test_cards_are_known_by_their_names(name: str, card: str) -> None:
    assert card_named(name) == card
    assert card in DEVICES
