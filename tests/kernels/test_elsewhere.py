"""Scores, selections, merges and copies of a second device (`support.elsewhere`): the same rows as here, and
no tensor of one device meets one of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvir.kernels.ref.compact import compact, copy_biases
from kvir.kernels.ref.merge import merge_rows
from kvir.policy_ir import load
from kvir.policy_ir.rules import Merge, Rule
from support.elsewhere import DEVICE, back, elsewhere, move
from support.score_cases import Shape
from support.selection_cases import TERMS, kept, rule_of

ROOT = Path(__file__).parents[2]
METHODS = sorted((ROOT / "examples" / "methods").glob("*.ir"))


def same_rows(rule: Rule, shape: Shape) -> None:
    here = kept(rule, shape)
    with elsewhere():
        found = kept(rule, shape, move)
        assert all(rows.device == DEVICE for rows in found.values())
    assert {unit: back(rows).tolist() for unit, rows in found.items()} == {
        unit: rows.tolist() for unit, rows in here.items()
    }
    assert here


def test_what_the_second_device_refuses() -> None:
    """As PyTorch does on a GPU."""
    with elsewhere() as mode:
        there, here = move(torch.arange(3)), torch.arange(3)
        assert there.device == (there + 1).device == torch.zeros(2, device=DEVICE).device == DEVICE
        for mixed in (lambda: there + here, lambda: torch.cat([here, there]), lambda: here[there]):
            with pytest.raises(RuntimeError, match="device"):
                mixed()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()
        assert (there + torch.tensor(1)).device == there[here].device == DEVICE  # as PyTorch allows
        assert there.cpu().numpy().tolist() == [0, 1, 2]
        assert mode.waits == {"cpu": 1}


@pytest.mark.parametrize("keep", TERMS.values(), ids=TERMS)
def test_terms(keep: str) -> None:
    same_rows(rule_of(keep), Shape(203, 2, 3, 6))
    same_rows(rule_of(keep), Shape(61, 3, 1, 10))


@pytest.mark.parametrize("path", METHODS, ids=lambda p: p.stem)
def test_every_example_method(path: Path) -> None:
    for rule in load(path).rules:
        if "per_head" not in path.read_text():  # a table of one model's layers
            same_rows(rule, Shape(401, 2, 3, 6))


@pytest.mark.parametrize("into", ["pairwise", "one", "neighbour"])
def test_merges_and_copies(into: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    k, v = (torch.randn(40, 16, generator=generator) for _ in range(2))
    q = torch.randn(4, 3, 16, generator=generator)
    stay = torch.arange(0, 40, 3)
    spec = Merge(into=into)

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        k, v, bias, positions, stay, q, at, kv, pages, biases = x
        merged = merge_rows(spec, k, v, bias, positions, stay, stay[1:9], q, at, 0.25, 0.0)
        rows = positions[: merged[0].shape[0]]
        assert compact(merged[0], merged[1], rows, kv, pages) == len(stay)
        copy_biases(merged[2], rows, biases, pages)
        return *merged, kv, biases

    given = (
        k, v, torch.zeros(40), torch.arange(40), stay, q, torch.arange(36, 40), torch.zeros(6, 2, 8, 16),
        torch.tensor([4, 2, 1]), torch.zeros(6, 8),
    )  # fmt: skip
    with elsewhere():
        found = run(*map(move, given))
        assert all(x.device == DEVICE for x in found)
    for got, wanted in zip(found, run(*given), strict=True):
        assert torch.equal(back(got), wanted)
