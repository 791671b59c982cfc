"""Hypothesis strategies for policies: every value that the types allow, from the shapes of the text."""

from __future__ import annotations

from typing import Any, assert_never

from hypothesis import strategies as st

from bench.random_policies import has_parts
from kvir.policy_ir import Policy
from kvir.policy_ir.nodes import MAX_TOKENS, IndexRange
from kvir.policy_ir.shape import (
    Choice,
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

_WORDS = st.sampled_from(
    ["null", "true", "no", "1.5", "E0", "a: b", "- x", "# y", "all", "0..3", "~", " a ", "é", "{", "'"]
)


def values(shape: Shape, depth: int = 0) -> st.SearchStrategy[Any]:
    match shape:
        case Whole(low=low, high=high):
            least = -MAX_TOKENS if low is None else low
            return st.integers(least, MAX_TOKENS if high is None else high)
        case Real(low=low, high=high, above=above, below=below):
            floor, ceiling = (low if above is None else above), (high if below is None else below)
            return st.floats(
                floor,
                ceiling,
                allow_nan=False,
                allow_infinity=False,
                exclude_min=above is not None,
                exclude_max=below is not None,
            )
        case Text(min_length=low, max_length=high):
            characters = st.characters(codec="utf-8").filter(str.isprintable)
            words = _WORDS.filter(lambda w: low <= len(w) <= (high or 99))
            return words | st.text(characters, min_size=low, max_size=min(high or 20, 20))
        case Flag():
            return st.booleans()
        case Choice(words=words):
            return st.sampled_from(words)
        case Range(high=high):
            ends = st.integers(0, high)
            return st.builds(lambda a, b: IndexRange(first=a, last=b), ends, ends)
        case WordOr(item=item):
            return st.none() | values(item, depth)
        case Many(item=item, min_length=low, max_length=high):
            lists = st.lists(values(item, depth + 1), min_size=low, max_size=max(low, min(high or 3, 3)))
            return lists.map(tuple)
        case Record(cls=cls):
            return _struct(cls, depth)
        case OneOf(by_tag=by_tag):
            # deep down only what has no parts, so that nested unions end
            classes = [c for c in by_tag.values() if depth < 3 or not has_parts(c)]
            return st.one_of([_struct(c, depth) for c in classes])
        case _:
            assert_never(shape)


def policies() -> st.SearchStrategy[Policy]:
    return values(Record(Policy))


def _struct(cls: type[Any], depth: int) -> st.SearchStrategy[Any]:
    def make(chosen: dict[str, Any]) -> Any:
        return cls(**chosen)

    fields = form(cls).fields.values()
    needed = {f.name: st.deferred(lambda f=f: values(f.shape, depth + 1)) for f in fields if f.required}
    free = {f.name: st.deferred(lambda f=f: values(f.shape, depth + 1)) for f in fields if not f.required}
    return st.fixed_dictionaries(needed, optional=free).map(make)
