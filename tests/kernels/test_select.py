"""Selection equals a greedy choice written as a loop, on ragged random cases full of equal scores."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvir.kernels.ref.select import select_top_k
from kvir.kernels.ref.select_mass import nucleus, select_top_p
from kvir.kernels.score_ops import Take, UnitScores

INF = float("inf")


def unit(scores: Sequence[float], layer: int = 0, head: int = 0, start: int = 0, stop: int | None = None):
    return UnitScores(layer, head, torch.tensor(scores), (start, len(scores) if stop is None else stop))


def chosen(units: Sequence[UnitScores], take: Take, **more: object) -> list[list[int]]:
    return [rows.tolist() for rows in select_top_k(units, take, **more)]  # type: ignore[arg-type]


# ---- the loop ----------------------------------------------------------------------------------------------


def greedy(
    units: Sequence[UnitScores], take: Take, ties: Sequence[Sequence[int]], block: int, newer: bool
) -> list[list[int]]:
    """One block after the other, best first; `ties` cover every unit."""
    if take.blend is not None:
        won = greedy(units, Take(take.rows, take.safe_rows, take.cap_rows), ties, block, newer)
        share, equal = Fraction(repr(take.blend[0])), take.blend[1]
        kept: list[list[int]] = [[] for _ in units]
        for tie in ties:
            count = floor((1 - share) * len(won[tie[0]]) + share * equal + Fraction(1, 2))
            alone = [list(range(len(tie)))]
            for u, rows in zip(
                tie, greedy([units[u] for u in tie], Take(count * len(tie)), alone, block, newer), strict=True
            ):
                kept[u] = rows
        return kept
    entries = []
    for tie in ties:
        first = units[tie[0]]
        blocks: dict[int, list[int]] = {}
        for row in range(*first.candidates):
            position = row if first.positions is None else int(first.positions[row])
            blocks.setdefault(position // block, []).append(row)
        common = torch.stack([units[u].scores for u in tie]).mean(dim=0)
        offers = []
        for rows in blocks.values():
            total = torch.zeros(())
            for row in rows:
                total = total + common[row]
            age = rows[0] if first.positions is None else int(first.positions[rows[0]])
            offers.append((float(total / len(rows)), -age if not newer else age, rows))
        offers.sort(key=lambda o: (-o[0], -o[1]))
        reached = 0
        for value, age, rows in offers:
            reached += len(rows)
            if take.cap_rows is not None and reached > take.cap_rows:
                continue
            place = min((units[u].layer, units[u].head) for u in tie)
            entries.append(((reached > take.safe_rows, -value, -age, place), tie, rows))
    left, out = take.rows, [[] for _ in units]
    for _, tie, rows in sorted(entries, key=lambda e: e[0]):
        if len(rows) * len(tie) > left:
            break
        left -= len(rows) * len(tie)
        for u in tie:
            out[u] += rows
    return [sorted(rows) for rows in out]


@given(data=st.data())
def test_equals_the_loop(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    tied = data.draw(st.booleans())
    block = data.draw(st.sampled_from([1, 1, 3, 5]))
    newer = data.draw(st.booleans())
    units = []
    for index in range(count):
        if tied and index:
            n, candidates, positions = len(units[0].scores), units[0].candidates, units[0].positions
        else:
            n = data.draw(st.integers(1, 14))
            start = data.draw(st.integers(0, n))
            candidates = (start, data.draw(st.integers(start, n)))
            gaps = torch.tensor(data.draw(st.lists(st.integers(1, 3), min_size=n, max_size=n)))
            positions = data.draw(st.sampled_from([None, gaps.cumsum(0)]))
        # few values, so that equal scores are common; halves, so that sums are exact
        values = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 4.0]), min_size=n, max_size=n))
        units.append(UnitScores(index % 2, index // 2, torch.tensor(values), candidates, positions))
    ties = [list(range(count))] if tied else [[u] for u in range(count)]
    share, equal = data.draw(st.sampled_from([0.2, 0.5, 1.0])), Fraction(data.draw(st.integers(0, 30)), count)
    take = Take(
        rows=data.draw(st.integers(0, 40)),
        safe_rows=data.draw(st.integers(0, 4)),
        cap_rows=data.draw(st.none() | st.integers(4, 10)),
        blend=data.draw(st.sampled_from([None, (share, equal)])),
    )
    got = chosen(
        units,
        take,
        ties=ties if tied else (),
        block=block,
        on_equal="newer" if newer else "older",
    )
    assert got == greedy(units, take, ties, block, newer)


# ---- worked examples ---------------------------------------------------------------------------------------


def test_a_unit_alone_keeps_its_best_rows() -> None:
    assert chosen([unit([3, 1, 2, 5, 4])], Take(2)) == [[3, 4]]
    assert chosen([unit([9, 1, 2, 5, 9], start=1, stop=4)], Take(2)) == [[2, 3]]
    assert chosen([unit([1, 2])], Take(7)) == [[0, 1]]
    assert chosen([unit([1, 2])], Take(0)) == [[]]
    assert chosen([unit([1, 2], start=1, stop=1)], Take(1)) == [[]]


def test_equal_scores() -> None:
    same = [unit([1] * 4, layer, head) for layer in (0, 1) for head in (0, 1)]
    assert chosen(same, Take(6)) == [[0, 1], [0, 1], [0], [0]]
    assert chosen(same, Take(6), on_equal="newer") == [[2, 3], [2, 3], [3], [3]]


def test_rivals_share_a_total_within_floor_and_cap() -> None:
    strong, weak = unit([9, 8, 7, 6]), unit([1, 2, 3, 4], head=1)
    assert chosen([strong, weak], Take(4)) == [[0, 1, 2, 3], []]
    assert chosen([strong, weak], Take(4, safe_rows=1)) == [[0, 1, 2], [3]]
    assert chosen([strong, weak], Take(4, cap_rows=3)) == [[0, 1, 2], [3]]
    # 4 and 0 won, an equal share is 2: half way is 3 and 1
    assert chosen([strong, weak], Take(4, blend=(0.5, Fraction(2)))) == [[0, 1, 2], [3]]


def test_tied_units_keep_the_same_rows() -> None:
    units = [unit([9, 0, 3, 0]), unit([0, 1, 4, 0], head=1), unit([0, 0, 0, 5], layer=1)]
    assert chosen(units[:2], Take(2), ties=[[0, 1]]) == [[0], [0]]
    assert chosen(units[:2], Take(4), ties=[[0, 1]], tie_reduce="max") == [[0, 2], [0, 2]]
    # the pair's rows count twice: 4.5, 3.5 and 5 compete for 5 rows
    assert chosen(units, Take(5), ties=[[0, 1]]) == [[0, 2], [0, 2], [3]]
    with pytest.raises(ValueError, match="same candidates"):
        chosen([units[0], unit([1, 2, 3, 4], start=1)], Take(2), ties=[[0, 1]])


def test_blocks_are_whole_and_aligned_to_positions() -> None:
    scores = unit([9, 0, 0, 5, 5, 5, 8, 8], start=1)
    # blocks 0..2 (rows 1, 2: mean 0), 3..5 (5), 6..8 (8): a block that does not fit ends the choice
    assert chosen([scores], Take(4), block=3) == [[6, 7]]
    assert chosen([scores], Take(5), block=3) == [[3, 4, 5, 6, 7]]


def test_infinite_scores_come_first_and_nan_is_refused() -> None:
    assert chosen([unit([1, INF, 2, INF])], Take(3)) == [[1, 2, 3]]
    with pytest.raises(ValueError, match="not a number"):
        chosen([unit([1, float("nan")])], Take(1))


# ---- mass --------------------------------------------------------------------------------------------------


def test_nucleus() -> None:
    assert nucleus(torch.tensor([0.5, 0.1, 0.3, 0.1]), 0.79).item() == 2
    assert nucleus(torch.tensor([0.5, 0.1, 0.3, 0.1]), 0.81).item() == 3
    assert nucleus(torch.tensor([5.0, 1.0, 3.0, 1.0]), 0.5).item() == 1
    assert nucleus(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]), 1.0).tolist() == [1, 2, 0]
    for wrong in ([1.0, -0.1], [1.0, INF], [float("nan")]):
        with pytest.raises(ValueError, match="distribution"):
            nucleus(torch.tensor(wrong), 0.5)


@given(
    weights=st.lists(st.integers(0, 50), min_size=1, max_size=40).filter(any),
    mass=st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]),
)
def test_nucleus_is_the_least_number(weights: list[int], mass: float) -> None:
    count = int(nucleus(torch.tensor(weights, dtype=torch.float32), mass))
    largest = sorted(weights, reverse=True)
    assert sum(largest[:count]) >= mass * sum(weights) - 1e-9
    assert sum(largest[: count - 1]) < mass * sum(weights)


def test_top_p_takes_the_count_from_one_score_and_rows_from_another() -> None:
    attention = torch.tensor([0.75, 0.125, 0.0625, 0.0625])
    metric = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert select_top_p(metric, attention, 0.875).tolist() == [2, 3]
    assert select_top_p(attention, attention, 0.875).tolist() == [0, 1]
    assert select_top_p(metric, attention, 0.875, floor=3).tolist() == [1, 2, 3]
    assert select_top_p(metric, attention, 0.875, cap=1).tolist() == [3]
    assert select_top_p(metric, attention, 0.875, floor=9).tolist() == [0, 1, 2, 3]
    assert select_top_p(metric[:0], attention[:0], 0.9).tolist() == []


def test_top_p_union_of_queries() -> None:
    """Each query names its own rows; past the cap the worst of them by the reduced score go."""
    rows = torch.tensor([[0.875, 0.125, 0.0, 0.0], [0.125, 0.0, 0.875, 0.0]])
    scores = torch.tensor([0.1, 0.3, 0.2, 0.4])
    per_query = (rows, rows)
    assert select_top_p(scores, scores, 0.875, per_query=per_query).tolist() == [0, 2]
    assert select_top_p(scores, scores, 0.875, per_query=per_query, cap=1).tolist() == [2]
    assert select_top_p(scores, scores, 0.875, per_query=per_query, floor=3).tolist() == [0, 2, 3]


def test_top_p_equal_scores() -> None:
    same = torch.ones(4)
    assert select_top_p(same, same, 0.5).tolist() == [0, 1]
    assert select_top_p(same, same, 0.5, on_equal="newer").tolist() == [2, 3]
