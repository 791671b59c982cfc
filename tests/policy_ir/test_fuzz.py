"""Mutated policies: a few thousand here, as many as you like with `python -m bench.fuzz_language`."""

from __future__ import annotations

from bench.fuzz_language import run

COUNT = 4000


def test_no_mutation_crashes_hangs_or_is_refused_without_a_reason() -> None:
    outcome = run(COUNT, seed=2024)
    assert outcome.failures == []
    assert outcome.accepted + outcome.refused == COUNT
    # the mutations reach both sides, and many kinds of findings
    assert outcome.accepted > COUNT / 20
    assert outcome.refused > COUNT / 4
    assert len(outcome.by_code) > 12
