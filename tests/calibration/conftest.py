"""Tiny models, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from support.tiny import tiny_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Family -> folder of a tiny random model."""

    @cache
    def made(family: str) -> Path:
        return tiny_model(tmp_path_factory.mktemp(family), family)

    return made
