"""Policies made at random from the types of the language: every node, field and bound, not only what examples
use."""

from __future__ import annotations

import random
from typing import Any, assert_never

from kvir.policy_ir import Policy
from kvir.policy_ir.nodes import IndexRange
from kvir.policy_ir.shape import (
    Choice,
    Field,
    Flag,
    Many,
    OneOf,
    Range,
    Real,
    Record,
    Shape,
    Text,
    Whole,
    WordOr,
    form,
)

MAX_DEPTH = 4
_WORDS = ("a", "null", "1.5", "a: b", "# y", "é", "{", "'", "0..3")


def random_policy(chance: random.Random) -> Policy:
    """A policy that the types allow; whether it makes sense is for `verify` to say."""
    policy = _value(Record(Policy), chance, 0)
    assert isinstance(policy, Policy)
    return policy


def _value(shape: Shape, chance: random.Random, depth: int) -> Any:
    match shape:
        case Whole(low=low, high=high):
            least, most = (0 if low is None else low), (1 << 30 if high is None else high)
            near = min(most, least + chance.choice((0, 1, 3, 40, 1000)))
            return chance.choice((least, near, near, near, most))
        case Real(low=low, high=high, above=above, below=below):
            least = low if above is None else above
            most = high if below is None else below
            span = (1.0 if most is None else most) - (least or 0.0)
            inside = (least or 0.0) + span * chance.choice((0.25, 0.5, chance.uniform(0.01, 0.99)))
            return inside if high is None or chance.random() < 0.8 else high
        case Text(min_length=low, max_length=high):
            return chance.choice(_WORDS)[: high or 20].ljust(low, "x")
        case Flag():
            return chance.random() < 0.5
        case Choice(words=words):
            return chance.choice(words)
        case Range(high=high):
            first, more = chance.choice((0, 1, 2, high)), chance.choice((0, 0, 1, 3))
            return IndexRange(first=first, last=min(high, first + more))
        case WordOr(item=item):
            return None if chance.random() < 0.3 else _value(item, chance, depth)
        case Many(item=item, min_length=low, max_length=high):
            count = max(low, min(chance.choice((0, 1, 1, 2, 3, 4)), high or 4))
            return tuple(_value(item, chance, depth + 1) for _ in range(count))
        case Record(cls=cls):
            return _struct(cls, chance, depth)
        case OneOf(by_tag=by_tag):
            # deep down only what has no parts, so that scores inside scores end
            classes = [c for c in by_tag.values() if depth < MAX_DEPTH or not has_parts(c)]
            return _struct(chance.choice(classes), chance, depth)
        case _:
            assert_never(shape)


def _struct(cls: type[Any], chance: random.Random, depth: int) -> Any:
    given = {
        f.name: _value(f.shape, chance, depth + 1)
        for f in form(cls).fields.values()
        if f.required or chance.random() < 0.3
    }
    if cls is Policy:
        given |= {"kvir": 1, "model": None, "provenance": None}
    return cls(**given)


def has_parts(cls: type[Any]) -> bool:
    """Whether a struct cannot be made without another one."""
    return any(_is_part(f) for f in form(cls).fields.values())


def _is_part(field: Field) -> bool:
    return field.required and isinstance(field.shape, OneOf | Record)
