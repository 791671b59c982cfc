"""The temperature of Hard-KV's calibration and the count taken from the attention keep the same rows."""

from __future__ import annotations

import pytest
import torch

from kvir.kernels.ref.select_mass import nucleus, select_top_p
from kvir.kernels.ref.select_temperature import calibrated


@pytest.mark.parametrize("mass", [0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("seed", range(10))
def test_both_forms_keep_the_same_rows(mass: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(2, 200, (), generator=generator))
    attention = (4 * torch.randn(count, generator=generator)).softmax(0)
    logits = 3 * torch.randn(count, generator=generator)
    distribution = calibrated(logits, attention, mass)
    # the nucleus of the calibrated distribution: exactly `mass`, so a hair less is asked for
    by_temperature = select_top_p(distribution, distribution, mass * (1 - 1e-9))
    assert by_temperature.tolist() == select_top_p(logits, attention, mass).tolist()


def test_the_best_rows_hold_the_mass() -> None:
    generator = torch.Generator().manual_seed(0)
    attention = (3 * torch.randn(5, 64, generator=generator)).softmax(-1)
    logits = torch.randn(5, 64, generator=generator)
    counts = nucleus(attention, 0.9)
    assert len(set(counts.tolist())) > 1
    held = calibrated(logits, attention, 0.9).sort(dim=-1, descending=True).values
    for row, count in zip(held, counts.tolist(), strict=True):
        assert float(row[:count].sum()) == pytest.approx(0.9, abs=1e-9)


def test_equal_logits_have_no_such_temperature() -> None:
    attention = torch.tensor([0.9, 0.05, 0.05])
    found = calibrated(torch.zeros(3), attention, 0.8)
    assert found.tolist() == pytest.approx([1 / 3] * 3)
