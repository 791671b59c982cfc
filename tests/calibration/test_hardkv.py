"""`kvir calibrate hardkv`: limits of Hard-KV per KV head, from a calibrated plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.parts import head_adaptive
from kvir.calibration.hardkv.budgets import head_budgets, head_shares, limits
from kvir.cli import main
from kvir.lowering.load import plan_for_server
from kvir.policy_ir import load, parse
from support.models import CONFIGS

ROOT = Path(__file__).parents[2]
PLAN, MODEL = ROOT / "examples/polykv_smollm2_15.ir", CONFIGS / "smollm2-135m"


def words(output: Path, *more: str) -> list[str]:
    return ["calibrate", "hardkv", str(PLAN), "--model", str(MODEL), "-o", str(output), *more]


def test_the_example_is_what_the_command_writes_and_what_the_bench_serves(tmp_path: Path) -> None:
    output = tmp_path / "hardkv-smollm2.ir"
    assert main(words(output, "--rows", "128")) == 0
    example = load(ROOT / "examples/hardkv_smollm2.ir")
    assert load(output) == example
    budgets = head_adaptive.budgets_of(MODEL, 128)
    rules = head_adaptive._rules(budgets, lambda rows: head_adaptive._limits(0.9, rows))
    assert parse(f"kvir: 1\nname: bench\nrules:\n{rules}").rules == example.rules
    plan = plan_for_server(output, MODEL, dtype="bfloat16")
    caps = [
        max(q.cap or 0 for q in s.quotas) for row in plan.budgeted.decode for r in row if (s := r.selection)
    ]
    assert len(caps) == 87
    assert max(caps) > 5 * min(caps)


def test_numbers_of_rows_instead_of_limits(tmp_path: Path) -> None:
    output = tmp_path / "p.ir"
    assert main(words(output, "--rows", "128", "--fixed")) == 0
    budgets = head_adaptive.budgets_of(MODEL, 128)
    rules = head_adaptive._rules(budgets, head_adaptive._best)
    assert load(output).rules == parse(f"kvir: 1\nname: bench\nrules:\n{rules}").rules


def test_shares_are_what_a_plan_keeps_of_a_prompt(tmp_path: Path) -> None:
    rules = (
        "{keep: [{recent: 16}, {top_k: {fraction: {share: 0.3}, by: key_norm, counts: kept}}]}",
        "{layers: 1, keep: [{sink: 4}, {recent: 60}]}",
        "{layers: 2, keep: all}",
        "{layers: 3, keep: [{recent: 8}, {top_k: {tokens: 92, by: key_norm}}]}",
    )
    path = tmp_path / "p.ir"
    path.write_text("kvir: 1\nname: p\nrules:\n" + "".join(f"  - {rule}\n" for rule in rules))
    budgeted = plan_for_server(path, CONFIGS / "tiny-llama", dtype="float32").budgeted
    shares = head_shares(budgeted, 1000)
    assert [shares[layer, 0] for layer in range(4)] == [0.3, 0.064, 1.0, 0.1]


def test_budgets_have_their_mean() -> None:
    shares = {(0, head): share for head, share in enumerate((1.0, 0.9, 0.4, 0.2, *[0.1] * 16))}
    for mean in (60, 128, 300):
        budgets = head_budgets(shares, mean, 2000, 32)
        whole = [unit for unit, rows in budgets.items() if rows is None]
        held = sum(2000 / 2 if rows is None else rows for rows in budgets.values())
        assert abs(held / 20 - mean) < 1
        assert len(whole) == {60: 0, 128: 1, 300: 2}[mean]
        assert whole == list(shares)[: len(whole)]
    few = head_budgets(shares, 10, 2000, 32)
    assert set(few.values()) == {36}
    assert limits(132, 32) == (50, 125)
    alike = {(0, head): 1.0 for head in range(4)}
    assert head_budgets(alike, 2000, 2000, 32) == dict.fromkeys(alike)  # every head may keep all
    assert head_budgets(dict.fromkeys(alike, 0.0), 100, 2000, 32) == dict.fromkeys(alike, 36)


@pytest.mark.parametrize("more", [("--rows", "20"), ("--rows", "3000"), ("--rows", "99", "--every", "0")])
def test_what_does_not_fit_together_is_said_and_nothing_is_written(
    more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "p.ir"
    assert main(words(output, *more)) == 2
    assert "--rows is at least 36" in capsys.readouterr().err
    assert not output.exists()
