"""How each struct is written as text: one table that decoder, printer and schema walk.

Derived from the types (`msgspec.inspect`), so a new node needs no code here.  The rules of the text:

* A struct with a tag is written `{tag: {field: value, ...}}`; `{tag: value}` if its one required field is all
  there is to say and the value is not a mapping; the bare `tag` if nothing is to be said.
* A list of terms, ranges and other alternatives needs no brackets around one item: `keep: all`, `heads: 2`.
* An `IndexRange` is written `0..3`, or `7` for a single index.
* Where None means something in a list, the type names the word for it: `Meta(extra={"none": "full"})`.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import msgspec
import msgspec.inspect as inspect
from msgspec import NODEFAULT, Struct

from kvir.policy_ir.base import IndexRange, Node
from kvir.policy_ir.presets import Preset
from kvir.policy_ir.rules import Rule

# fields that people read first; the others follow in the order of the struct
_PRINTED_FIRST: dict[str, tuple[str, ...]] = {"Rule": ("layers", "heads", "phase"), "Windows": ("sink",)}

# a key that stands for several fields: its name and the union of what it takes
_SUGAR: dict[type[Struct], tuple[str, Any]] = {Rule: ("preset", Preset)}


class Whole(Struct, frozen=True):
    """An integer in [low, high]."""

    low: int | None = None
    high: int | None = None


class Real(Struct, frozen=True):
    """A finite number, its bounds included unless `above` or `below` says that they are not."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None


class Text(Struct, frozen=True):
    """Printable text on one line."""

    min_length: int = 0
    max_length: int | None = None


class Flag(Struct, frozen=True):
    """true or false."""


class Choice(Struct, frozen=True):
    """One of these words."""

    words: tuple[str, ...]


class Range(Struct, frozen=True):
    """`first..last` or a single index: an `IndexRange`."""

    high: int


class WordOr(Struct, frozen=True):
    """A word that stands for None, or the item."""

    word: str
    item: Shape


class Many(Struct, frozen=True):
    """A list; `lone` allows a single item without brackets."""

    item: Shape
    lone: bool
    min_length: int = 0
    max_length: int | None = None


class Record(Struct, frozen=True):
    """A struct, written as a mapping of its fields."""

    cls: type[Struct]


class OneOf(Struct, frozen=True):
    """A tagged union; `title` is what messages call its members."""

    by_tag: dict[str, type[Struct]]
    title: str


Shape = Whole | Real | Text | Flag | Choice | Range | WordOr | Many | Record | OneOf


class Field(Struct, frozen=True):
    """A field of a struct, as text sees it."""

    name: str
    shape: Shape
    required: bool
    default: Any  # NODEFAULT if required
    inline: bool = False  # a union whose tag is itself a key of the owner


class Form(Struct, frozen=True):
    """A struct: its fields by name in printing order, its tag, and the words that messages use for it."""

    cls: type[Struct]
    fields: dict[str, Field]
    tag: str | None
    title: str
    sugar: Field | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Every key that text may have."""
        own: list[str] = []
        for f in self.fields.values():
            own += f.shape.by_tag if f.inline and isinstance(f.shape, OneOf) else [f.name]
        return (*own, self.sugar.name) if self.sugar is not None else tuple(own)

    def field(self, key: str) -> Field | None:
        """The field that a key of the text stands for."""
        found = self.fields.get(key)
        if found is not None and not found.inline:
            return found
        if self.sugar is not None and key == self.sugar.name:
            return self.sugar
        inline = (f for f in self.fields.values() if f.inline)
        return next((f for f in inline if isinstance(f.shape, OneOf) and key in f.shape.by_tag), None)

    @property
    def short_field(self) -> Field | None:
        """The field whose value may stand for the whole struct: the only required one."""
        required = [f for f in self.fields.values() if f.required]
        return required[0] if len(required) == 1 and not required[0].inline else None

    @property
    def may_be_bare(self) -> bool:
        """Whether the tag alone says it all."""
        return not any(f.required for f in self.fields.values())


@functools.cache
def form(cls: type[Struct]) -> Form:
    """The text form of a struct."""
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    fields = {f.name: Field(f.name, shape(f.type), f.required, _default(f), _inline(f)) for f in info.fields}
    first = _PRINTED_FIRST.get(cls.__name__, ())
    ordered = {name: fields[name] for name in (*first, *(n for n in fields if n not in first))}
    tag = None if info.tag is None else str(info.tag)
    title = f"`{tag}`" if tag else "the " + re.sub(r"(?<=[a-z])(?=[A-Z])", " ", cls.__name__).lower()
    sugar = None
    if cls in _SUGAR:
        name, union = _SUGAR[cls]
        sugar = Field(name, shape(inspect.type_info(union)), required=False, default=None)
    return Form(cls, ordered, tag, title, sugar)


def shape(info: inspect.Type) -> Shape:
    """The shape of a type.  A type that text has no form for is an error in `nodes`, not in a policy."""
    match info:
        case inspect.IntType():
            low = info.ge if info.ge is not None else None if info.gt is None else info.gt + 1
            high = info.le if info.le is not None else None if info.lt is None else info.lt - 1
            return Whole(low, high)
        case inspect.FloatType():
            return Real(info.ge, info.le, info.gt, info.lt)
        case inspect.StrType():
            return Text(info.min_length or 0, info.max_length)
        case inspect.BoolType():
            return Flag()
        case inspect.LiteralType():
            return Choice(tuple(str(v) for v in info.values))
        case inspect.Metadata(extra={"none": str(word)}):
            return WordOr(word, shape(info.type))
        case inspect.Metadata():
            return shape(info.type)
        case inspect.VarTupleType():
            item = shape(info.item_type)
            lone = isinstance(item, OneOf | Range | Choice)
            return Many(item, lone, info.min_length or 0, info.max_length)
        case inspect.StructType(cls=cls) if cls is IndexRange:
            (first, _) = (f.type for f in info.fields)
            assert isinstance(first, inspect.IntType)
            assert first.lt is not None
            return Range(first.lt - 1)
        case inspect.StructType():
            return Record(info.cls) if info.tag is None else _one_of([info])
        case inspect.UnionType():
            parts = [t for t in info.types if not isinstance(t, inspect.NoneType)]
            if len(parts) == 1:
                return shape(parts[0])
            return _one_of([t for t in parts if isinstance(t, inspect.StructType)])
        case _:
            raise TypeError(f"no text form for {info!r}")


def _one_of(types: list[inspect.StructType]) -> OneOf:
    base = types[0].cls.__mro__[1]
    title = "value" if base is Node else base.__name__.removesuffix("Base").lower()
    return OneOf({str(t.tag): t.cls for t in types}, title)


def _inline(field: inspect.Field) -> bool:
    match field.type:
        case inspect.Metadata(extra={"inline": True}):
            return True
        case _:
            return False


def _default(field: inspect.Field) -> Any:
    if field.default_factory is not NODEFAULT:
        return field.default_factory()
    return field.default


def plain_default(field: Field, value: Any) -> bool:
    """Whether a value need not be written."""
    return not field.required and bool(msgspec.to_builtins(value) == msgspec.to_builtins(field.default))
