"""Smoothing of scores along the rows of a unit."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvir.policy_ir.base import Node

Width = Annotated[int, Meta(ge=1, le=1025)]  # odd, or the number of rows would change


class PoolBase(Node, frozen=True):
    """Base of every pooling; stride 1, zero padding of width // 2 on both sides, so an odd width keeps N."""


class AveragePool(PoolBase, frozen=True, tag="average"):
    """The mean over `width` neighbours; padding counts as zeros."""

    width: Width


class MaxPool(PoolBase, frozen=True, tag="max"):
    """The largest of `width` neighbours; padding never wins."""

    width: Width


Pool = AveragePool | MaxPool
PoolOrNone = Annotated[Pool | None, Meta(extra={"none": "none"})]
