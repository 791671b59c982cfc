"""Kept rows land in head-pages in the order of their positions, and attention over them is the same."""

from __future__ import annotations

import pytest
import torch

from kvir.kernels.ref.attend import attention
from kvir.kernels.ref.compact import compact


@pytest.mark.parametrize("page_rows", [1, 3, 16])
@pytest.mark.parametrize("kept", [0, 1, 15, 16, 17, 48, 61])
def test_rows_go_to_pages_in_order(kept: int, page_rows: int) -> None:
    torch.manual_seed(kept)
    k, v = torch.randn(2, 61, 7)
    rows = torch.randperm(61)[:kept].sort().values
    count = -(-kept // page_rows)
    pages = torch.randperm(90)[: count + 1].int()
    kv = torch.full((90, 2, page_rows, 7), torch.nan)
    assert compact(k, v, rows, kv, pages) == kept
    written = kv[pages[:count].long()]  # [pages, 2, P, D]
    flat = written.transpose(1, 2).reshape(count * page_rows, 2, 7)
    assert torch.equal(flat[:kept, 0], k[rows])
    assert torch.equal(flat[:kept, 1], v[rows])
    # nothing else was written: not the end of the last page, not the spare page, not the rest of the pool
    assert int(torch.isnan(kv).logical_not().sum()) == kept * 2 * 7


def test_attention_over_pages_is_attention_over_kept_rows() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 40, 8)
    q = torch.randn(1, 3, 8)
    rows = torch.tensor([0, 1, 5, 8, 13, 21, 34, 39])
    kv = torch.zeros(5, 2, 3, 8)
    pages = torch.tensor([4, 0, 2])
    compact(k, v, rows, kv, pages)
    flat = kv[pages].transpose(1, 2).reshape(9, 2, 8)[:8]
    mask = torch.zeros(1, 40, dtype=torch.bool)
    mask[0, rows] = True
    wanted = attention(q, k, v, mask, 0.3, 0.0)
    got = attention(q, flat[:, 0], flat[:, 1], torch.ones(1, 8, dtype=torch.bool), 0.3, 0.0)
    assert torch.allclose(got, wanted, atol=1e-6)


def test_rows_are_stored_in_the_type_of_the_pool() -> None:
    k, v = torch.randn(2, 5, 4)
    kv = torch.zeros(2, 2, 4, 4, dtype=torch.bfloat16)
    compact(k, v, torch.arange(5), kv, torch.tensor([1, 0]))
    assert torch.equal(kv[1, 0], k[:4].bfloat16())


@pytest.mark.parametrize("rows", [[3, 2], [2, 2], [-1, 2], [2, 5]])
def test_rows_that_do_not_ascend_or_do_not_exist_are_refused(rows: list[int]) -> None:
    k, v = torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match="must ascend"):
        compact(k, v, torch.tensor(rows), torch.zeros(2, 2, 4, 4), torch.tensor([1, 0]))


def test_too_few_pages_are_refused() -> None:
    k, v = torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match="5 rows do not fit in 1 head-pages of 4"):
        compact(k, v, torch.arange(5), torch.zeros(2, 2, 4, 4), torch.tensor([1]))
