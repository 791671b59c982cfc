"""The words of messages: what was expected, what was found, what to write instead."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import assert_never

from kvir.policy_ir.shape import (
    Choice,
    Field,
    Flag,
    Form,
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
from kvir.policy_ir.source import Broken, Mapping, Scalar, Sequence, Tree

_QUOTED_LENGTH = 40


def quote(text: str) -> str:
    """User text in backquotes, cut to a readable length."""
    return f"`{text if len(text) <= _QUOTED_LENGTH else text[: _QUOTED_LENGTH - 1] + '…'}`"


def closest(word: str, words: Iterable[str]) -> str | None:
    """The word that was probably meant."""
    return _closest(word[:100].lower().replace("-", "_"), tuple(words))


@functools.lru_cache(maxsize=1024)
def _closest(word: str, words: tuple[str, ...]) -> str | None:
    from difflib import get_close_matches  # slow to import, needed only for errors

    matches = get_close_matches(word, words, 1, 0.6)
    return matches[0] if matches else None


def choose(word: str, words: tuple[str, ...]) -> str:
    """Did you mean, or the list."""
    guess = closest(word, words)
    if guess is not None:
        return f"did you mean `{guess}`?"
    return f"write {one_of(words)}"


def one_of(words: Iterable[str]) -> str:
    *most, last = (f"`{w}`" for w in words)
    return f"{', '.join(most)} or {last}" if most else last


def expected(shape: Shape) -> str:
    """A noun phrase for what may stand there."""
    match shape:
        case Whole(low=low, high=high):
            return "a whole number" + _bounds(low, high)
        case Real(low=low, high=high, above=above, below=below):
            lower = [f"from {low:g}"] if low is not None else [] if above is None else [f"above {above:g}"]
            upper = [f"up to {high:g}"] if high is not None else [] if below is None else [f"below {below:g}"]
            return " ".join(["a number", *lower, *upper])
        case Text():
            return "text"
        case Flag():
            return "`true` or `false`"
        case Choice(words=words):
            return one_of(words)
        case Range():
            return "an index like `7` or a range like `0..3`"
        case WordOr(word=word, item=item):
            return f"{expected(item)}, or `{word}`"
        case Many(item=item, lone=lone, min_length=low, max_length=high):
            count = "" if not low and high is None else f",{_bounds(low, high)} items"
            count = ", not empty" if (low, high) == (1, None) else count
            return (f"{expected(item)}, or a list of them" if lone else f"a list of {_plural(item)}") + count
        case Record(cls=cls):
            return f"a mapping with {one_of(form(cls).keys)}"
        case OneOf(by_tag=by_tag, title=title):
            return one_of(by_tag) if len(by_tag) <= 5 else f"{article(title)} {title}"
        case _:
            assert_never(shape)


def article(noun: str) -> str:
    return "an" if noun[0] in "aeiou" else "a"


def found(node: Tree) -> str:
    match node:
        case Scalar(text=text, plain=plain):
            if plain and text in ("true", "false"):
                return quote(text)
            if plain and re.fullmatch(r"[-+]?\.?[0-9][0-9.]*([eE][-+]?[0-9]+)?", text):
                return f"the number {quote(text)}"
            quoted = "" if plain else "quoted "
            return f"the {quoted}text {quote(text)}" if text else "an empty text"
        case Sequence():
            return "a list"
        case Mapping():
            return "a mapping"
        case Broken():
            return "something broken"
        case _:
            assert_never(node)


def conversion(node: Tree, shape: Shape) -> tuple[str, ...]:
    """What to write instead of a value of the wrong kind, where that is clear."""
    match node, shape:
        case Scalar(plain=True, text=text), Text() if text:
            return (f'put quotes around it: `"{text[:_QUOTED_LENGTH]}"`',)
        case Scalar(plain=False, text=text), Whole() | Real() if re.fullmatch(r"[-+]?[0-9.]+", text):
            return (f"remove the quotes: {quote(text)}",)
        case Scalar(text=text), Whole() | WordOr() if re.fullmatch(r"[0-9]+[kKmM]i?", text):
            return ("write the number out: `1024`, not `1k`",)
        case _, OneOf(by_tag=by_tag) if len(by_tag) == 1:
            return (f"write {example(form(next(iter(by_tag.values()))))}",)
        case _, OneOf(by_tag=by_tag, title=title) if len(by_tag) > 5:
            return (f"the {title}s are {one_of(by_tag)}",)
        case Sequence(items=[_]), Whole() | Real() | Text() | Flag() | Choice():
            return ("remove the brackets",)
        case _:
            return ()


def number_help(text: str, what: str) -> str:
    bare = text.lstrip("+-")
    if re.fullmatch(r"0[0-9]+", bare):
        return f"remove the leading zeros: `{bare.lstrip('0') or '0'}`"
    if re.fullmatch(r"[0-9][0-9_,]+", bare):
        return f"write the digits alone: `{re.sub('[_,]', '', bare)}`"
    if re.fullmatch(r"[0-9]+[kKmM]i?[bB]?", bare):
        return "write the number out: `1024`, not `1k`"
    return f"write {what} in decimal digits"


def range_help(text: str) -> str:
    if found_range := re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-|:|\.{1,4}|to|,)=?\s*([0-9]{1,9})\s*", text):
        return f"write `{found_range[1]}..{found_range[2]}`; both ends are included"
    if re.fullmatch(r"\s*(\.\.+\s*[0-9]+|[0-9]+\s*\.\.+)\s*", text):
        return "give both ends, like `0..3`"
    if text.strip() in ("all", "*", "any"):
        return "leave the field out to select them all"
    return "write an index like `7`, a range like `0..3`, or a list of them like `[0..3, 9]`"


def field_list(struct: Form) -> str:
    if not struct.fields:
        return f"{struct.title} has no fields"
    return f"the fields of {struct.title} are {', '.join(f'`{key}`' for key in struct.keys)}"


def fields_needed(struct: Form) -> str:
    return " and ".join(
        f"its {f.shape.title}" if f.inline and isinstance(f.shape, OneOf) else f"`{f.name}`"
        for f in struct.fields.values()
        if f.required
    )


def example(struct: Form) -> str:
    """The least text of a tagged struct."""
    if struct.may_be_bare:
        return f"`{struct.tag}`"
    if (field := struct.short_field) is not None and not isinstance(field.shape, Record):
        return f"`{{{struct.tag}: {_sample(field.shape)}}}`"
    inner = ", ".join(_sample_field(f) for f in struct.fields.values() if f.required)
    return f"`{{{struct.tag}: {{{inner}}}}}`"


def _sample_field(field: Field) -> str:
    if field.inline and isinstance(field.shape, OneOf):
        tag, cls = next(iter(field.shape.by_tag.items()))
        short = form(cls).short_field
        return f"{tag}: {_sample(short.shape) if short else '...'}"
    return f"{field.name}: {_sample(field.shape)}"


def _sample(shape: Shape) -> str:
    match shape:
        case Whole(low=low):
            return str(max(low or 0, 64))
        case Real():
            return "0.5"
        case Choice(words=words):
            return words[0]
        case Range():
            return "0..3"
        case Flag():
            return "true"
        case OneOf(by_tag=by_tag):
            return next((tag for tag, cls in by_tag.items() if form(cls).may_be_bare), "...")
        case Many() | WordOr() | Record() | Text():
            return "..."
        case _:
            assert_never(shape)


def _plural(shape: Shape) -> str:
    match shape:
        case Many(item=item):
            return f"lists of {_plural(item)}"
        case Whole(low=low, high=high):
            return "whole numbers" + _bounds(low, high)
        case WordOr(word=word, item=item):
            return f"{_plural(item)} or `{word}`"
        case Record():
            return expected(shape).replace("a mapping", "mappings", 1)
        case _:
            return expected(shape)


def _bounds(low: int | None, high: int | None) -> str:
    if low is not None and high is not None:
        return f" from {low} to {high}"
    if low is not None:
        return f" of at least {low}"
    return "" if high is None else f" of at most {high}"
