"""Kernels by name, and what happens where they cannot run."""

from __future__ import annotations

import logging

import pytest

from kvir.kernels import dispatch
from kvir.kernels.cpu import ops as cpu


def test_get_gives_the_kernels_of_that_name() -> None:
    assert [dispatch.get(name).name for name in ("ref", "cpu")] == ["ref", "cpu"]


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ValueError, match=r"no kernels called 'gpu'; there are: .*cpu.*ref"):
        dispatch.get("gpu")


def test_choose_takes_the_preferred_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    assert dispatch.choose("cpu").name == "cpu"
    assert caplog.records == []


def test_choose_falls_back_to_the_reference_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cpu, "available", lambda: "no compiler")
    with caplog.at_level(logging.DEBUG):
        assert dispatch.choose("cpu").name == "ref"
    assert [r.getMessage() for r in caplog.records] == [
        "kernels 'cpu' cannot run here (no compiler); using 'ref', which is slow"
    ]
    with pytest.raises(dispatch.KernelsUnavailable, match="'cpu' cannot run here: no compiler"):
        dispatch.get("cpu")


def test_an_extension_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "sources_digest", lambda: "0123456789abcdef")
    assert cpu.available() == (
        "compiled from other sources; run `python -m kvir.kernels.cpu.build` (needs g++ or clang++)"
    )


def test_an_extension_that_is_not_built_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.available() is None
    monkeypatch.setattr(cpu, "_ops", None)
    monkeypatch.setattr(cpu, "__file__", "/nowhere/ops.py")
    assert "python -m kvir.kernels.cpu.build" in (cpu.available() or "")
