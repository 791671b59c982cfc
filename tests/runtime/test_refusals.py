"""What `--kv-ir` does not go together with, flag by flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvir.lowering.pipeline import lower
from kvir.policy_ir.parse import parse
from kvir.sglang_ext import refusals
from kvir.sglang_ext.errors import KvirError
from kvir.sglang_ext.refusals import REFUSALS, check_ranks, check_raw, check_resolved, flag_of
from kvir.sglang_ext.server_args import KvirServerArgs
from support.models import made

# a value that kvir cannot serve, for every field that is not a plain switch
BAD: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "prefill",
    "pp_size": 2,
    "dp_size": 2,
    "dcp_size": 2,
    "attn_cp_size": 2,
    "kv_cache_dtype": "fp8_e4m3",
    "dllm_algorithm": "LowConfidence",
    "attention_backend": "triton",
    "prefill_attention_backend": "fa3",
    "decode_attention_backend": "flashinfer",
    "radix_cache_backend": "lmcache",
    "page_size": 64,
}
FIELDS = [field for refusal in REFUSALS for field in refusal.fields]


@pytest.fixture
def policy(tmp_path: Path) -> str:
    file = tmp_path / "policy.ir"
    file.write_text("kvir: 1\nname: any\nrules: [{keep: all}]\n")
    return str(file)


def arguments(policy: str, **others: Any) -> KvirServerArgs:
    given: dict[str, Any] = {"model_path": "nowhere", "kv_ir": policy, **others}
    return KvirServerArgs(**given)


def test_defaults_are_accepted(policy: str) -> None:
    check_raw(arguments(policy))


@pytest.mark.parametrize("field", FIELDS)
def test_every_refusal_names_its_flag_and_a_remedy(field: str, policy: str) -> None:
    default = getattr(arguments(policy), field)
    bad = BAD.get(field, True)
    assert bad != default
    assert field in BAD or default is False, f"{field} is not a switch: say what is bad"
    for check in (check_raw, check_resolved):
        with pytest.raises(KvirError) as refused:
            check(arguments(policy, **{field: bad}))
        text = str(refused.value)
        assert text.startswith(f"error: --kv-ir does not go together with {flag_of(field)}: ")
        assert text.count("error:") == 1
        assert "\n  help: " in text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("page_size", 16),
        ("kv_cache_dtype", "bfloat16"),
        ("attention_backend", "kvir"),
        ("radix_cache_backend", "kvir"),
        ("disable_overlap_schedule", True),
        ("chunked_prefill_size", 128),
        ("schedule_policy", "lpm"),
    ],
)
def test_what_goes_together(field: str, value: object, policy: str) -> None:
    check_raw(arguments(policy, **{field: value}))


@pytest.mark.parametrize(
    ("device", "ranks", "where"), [("cuda", 1, "on a GPU: "), ("cpu", 2, "on several ranks: ")]
)
def test_decode_is_compiled_on_one_cpu(device: str, ranks: int, where: str, policy: str) -> None:
    check_resolved(arguments(policy, enable_torch_compile=True, device="cpu"))
    with pytest.raises(KvirError) as refused:
        check_resolved(arguments(policy, enable_torch_compile=True, device=device, tp_size=ranks))
    text = str(refused.value)
    assert text.startswith(f"error: --kv-ir does not go together with --enable-torch-compile {where}")
    assert "\n  help: " in text


def test_all_reasons_at_once(policy: str) -> None:
    with pytest.raises(KvirError) as refused:
        check_raw(arguments(policy, pp_size=2, enable_mixed_chunk=True))
    assert str(refused.value).count("error: ") == 2


@pytest.mark.parametrize(
    ("rules", "ranks", "why"),
    [
        ("[{keep: all}]", 4, "12 query heads and 6 KV heads do not divide over 4 ranks"),
        (
            "[{keep: all}, {layers: 1, keep: {top_k: {tokens: 9, by: key_norm, scope: layer}}, "
            "trigger: prefill_end}]",
            2,
            r"in rules\[1\] heads compete",
        ),
        (
            "[{keep: {top_k: {tokens: 9, by: last_query, tie: layer}}, trigger: {every: 8}}]",
            3,
            r"in rules\[0\] heads compete for rows or keep the same ones",
        ),
    ],
)
def test_heads_that_ranks_cannot_share_out(rules: str, ranks: int, why: str) -> None:
    model = made(layers=2, kv_heads=6, group=2)
    plan = lower(parse(f"kvir: 1\nname: any\nrules: {rules}\n"), model, dtype="float32", device="cpu")
    check_ranks(plan, 1)
    with pytest.raises(KvirError, match=why) as refused:
        check_ranks(plan, ranks)
    assert f"--tp-size {ranks}" in str(refused.value)
    assert "\n  help: use --tp-size 1" in str(refused.value)


def test_heads_that_select_by_themselves_are_shared_out() -> None:
    rule = "{keep: {top_p: {mass: 0.9, by: attention, cap: 64}}, trigger: {every: 8}}"
    model = made(layers=2, kv_heads=6, group=2)
    plan = lower(parse(f"kvir: 1\nname: any\nrules: [{rule}]\n"), model, dtype="float32", device="cpu")
    for ranks in (1, 2, 3, 6):
        check_ranks(plan, ranks)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(KvirError, match=r"missing\.ir: no such file"):
        check_raw(arguments(str(tmp_path / "missing.ir")))


def test_from_a_program_it_is_an_exception_from_the_command_line_an_exit_code(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KvirError):
        arguments(policy, pp_size=2).resolve_once()
    assert capsys.readouterr().err == ""
    from_command_line = arguments(policy, pp_size=2)
    from_command_line.__dict__["_kvir_from_command_line"] = True
    with pytest.raises(SystemExit) as ended:
        from_command_line.resolve_once()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: --kv-ir does not go together with --pp-size")


def test_flags_are_spelled_as_on_the_command_line(policy: str) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    KvirServerArgs.add_cli_args(parser)
    known = {option for action in parser._actions for option in action.option_strings}
    # not settable by a flag of that name: SGLang derives it, or spells it otherwise
    assert {flag_of(field) for field in FIELDS} - known <= set()
    assert refusals.PAGE_TOKENS == 16
