"""The examples in the repository are what their grids say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvir.calibration import result
from kvir.calibration.policy import policy_text
from kvir.calibration.residual import allocate
from kvir.calibration.result import kept_share
from support.models import config_model

ROOT = Path(__file__).parents[2]


MODELS = {
    "headwise_gemma3": "gemma-3-270m",
    "headwise_smollm2": "smollm2-135m",
    "headwise_smollm2_quarter": "smollm2-135m",
}


@pytest.mark.parametrize("name", MODELS)
def test_the_example_is_made_of_its_grid(name: str) -> None:
    found = result.read((ROOT / f"docs/{name}.json").read_bytes())
    text = (ROOT / f"examples/{name}.ir").read_text(encoding="utf-8")
    header = [line[2:] for line in text.splitlines() if line.startswith("# ")]
    assert policy_text(config_model(MODELS[name]), found, name.replace("_", "-"), header) == text
    assert any(line.startswith("kvir calibrate seqcalib --model ") for line in header)


def test_the_allocation_beats_the_threshold_at_the_same_rows() -> None:
    found = result.read((ROOT / "docs/headwise_smollm2.json").read_bytes())
    assert found.inputs.budget is not None
    assert found.best.kept_share <= found.inputs.budget
    (threshold,) = [point for point in found.points if point.tau == 0.98]
    assert found.errors is not None
    assert threshold.error is not None
    context, heads = found.inputs.counted_tokens, len(found.errors[0][0])
    costs = [[code.rows(context) for code in found.codes]] * len(found.errors)
    limit = round(threshold.kept_share * context * heads * len(costs))
    taken = allocate(found.errors, costs, limit)
    assert taken is not None
    assert kept_share(taken, costs) <= threshold.kept_share
    rows = zip(found.errors, taken, strict=True)
    assert sum(layer[k][head] for layer, row in rows for head, k in enumerate(row)) < threshold.error
