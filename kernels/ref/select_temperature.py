"""Hard-KV's calibration as the paper writes it: a temperature that gives a metric the attention's nucleus.

`top_p` with `of` (`select_mass.py`) takes the count from the attention, the order from the metric, and
needs no temperature.  This is the other form, for readers of the paper and for a test that both keep the same
rows.  One temperature per row of logits, found by bisection: the published solver's never moves from 0.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvir.kernels.ref.select_mass import nucleus

STEPS = 200  # of bisection, on a logarithmic scale


def calibrated(logits: Tensor, attention: Tensor, mass: float) -> Tensor:
    """The metric's distribution at the temperature at which its best K rows hold `mass`: float64 [..., C].

    logits [..., C] of the metric; attention [..., C] as a distribution; K is the nucleus of the attention
    (arXiv:2606.28831, the calibration of logits).  A share that no temperature reaches, because too many of
    the logits are equal, is come as close to as possible.
    """
    logits, count = logits.double(), nucleus(attention, mass)
    ordered = logits.sort(dim=-1, descending=True).values
    best = torch.arange(logits.shape[-1], device=count.device) < count[..., None]
    low = torch.full(
        count.shape, -30.0, dtype=torch.float64, device=count.device
    )  # logarithms of temperatures
    high = torch.full(count.shape, 30.0, dtype=torch.float64, device=count.device)
    for _ in range(STEPS):
        middle = (low + high) / 2
        held = (_softmax(ordered, middle) * best).sum(-1)
        too_flat = held < mass  # a higher temperature holds less
        high = torch.where(too_flat, middle, high)
        low = torch.where(too_flat, low, middle)
    return _softmax(logits, low)


def _softmax(logits: Tensor, log_temperature: Tensor) -> Tensor:
    return (logits / log_temperature.exp()[..., None]).softmax(-1)
