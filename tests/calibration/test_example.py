"""The example in the repository is what its grid says."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvir.calibration import result
from kvir.calibration.policy import policy_text
from support.models import config_model

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["headwise_smollm2", "headwise_smollm2_quarter"])
def test_the_example_is_made_of_its_grid(name: str) -> None:
    found = result.read((ROOT / f"docs/{name}.json").read_bytes())
    text = (ROOT / f"examples/{name}.ir").read_text(encoding="utf-8")
    header = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    assert policy_text(config_model("smollm2-135m"), found, name.replace("_", "-"), header) == text
    assert any(line.startswith("kvir calibrate seqcalib --model ") for line in header)


def test_the_allocation_keeps_less_and_changes_less_than_the_threshold_beside_it() -> None:
    found = result.read((ROOT / "docs/headwise_smollm2.json").read_bytes())
    assert found.inputs.budget is not None
    assert found.best.kept_share <= found.inputs.budget
    (threshold,) = [point for point in found.points if point.tau == 0.98]
    assert threshold.error is not None
    assert found.best.error is not None
    assert found.best.kept_share < threshold.kept_share
    assert found.best.error < threshold.error
