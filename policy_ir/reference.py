"""The reference of the language: every node with its fields, from the types and their comments.

`python -m kvir.policy_ir.reference > docs/reference.md`; the JSON Schema shows the same words in editors.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator

from msgspec import Struct

from kvir.policy_ir.base import MAX_TOKENS
from kvir.policy_ir.describe import article, expected
from kvir.policy_ir.nodes import Policy
from kvir.policy_ir.printer import value_text
from kvir.policy_ir.shape import Field, Many, OneOf, Record, Shape, WordOr, form

_FIELD = re.compile(r"    (\w+): .*?(?:  # (.*))?$")
_BOUNDS = re.compile(rf" from (\d+) to {MAX_TOKENS}")  # a bound that nobody meets
_COMMENT = re.compile(r"    # (.*)$")


@functools.cache
def field_comments(cls: type[Struct]) -> dict[str, str]:
    """What the source says about each field: the comment after it, or above it."""
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in inspect.getsource(cls).splitlines():
        if found := _COMMENT.match(line):
            above.append(found[1])
        elif (found := _FIELD.match(line)) and found[1] in cls.__struct_fields__:
            comments[found[1]] = found[2] or " ".join(above)
            above = []
    return {name: text for name, text in comments.items() if text}


def as_markdown() -> str:
    """docs/reference.md."""
    lines = [
        "# Reference of the policy language",
        "",
        "Made from the types by `python -m kvir.policy_ir.reference > docs/reference.md`; change it there.",
        "[language.md](language.md) explains the language; this page lists every node and field.",
        "A node with one required field may be written short: `{recent: 64}` is `{recent: {tokens: 64}}`.",
        "",
    ]
    seen: set[type[Struct]] = set()
    titles: set[str] = set()
    for title, classes in _groups(Record(Policy), titles):
        fresh = [cls for cls in classes if cls not in seen]
        seen.update(fresh)
        if title and fresh:
            lines += [f"## {title[0].upper()}{title[1:]}s", ""]
        for cls in fresh:
            lines += _node(cls, "###" if title else "##")
    return "\n".join(lines)


def _groups(shape: Shape, titles: set[str]) -> Iterator[tuple[str, list[type[Struct]]]]:
    """Records and unions in the order in which a reader meets them: (title or "", classes)."""
    match shape:
        case Record(cls=cls):
            classes, title = [cls], ""
        case OneOf(by_tag=by_tag, title=title):
            if title in titles:
                return
            titles.add(title)
            classes = list(by_tag.values())
        case Many(item=item) | WordOr(item=item):
            yield from _groups(item, titles)
            return
        case _:
            return
    yield title, classes
    for cls in classes:
        struct = form(cls)
        for field in (*struct.fields.values(), *([struct.sugar] if struct.sugar else [])):
            if not (isinstance(field.shape, Record) and field.shape.cls is cls):
                yield from _groups(field.shape, titles)


def _node(cls: type[Struct], heading: str) -> list[str]:
    struct = form(cls)
    name = f"`{struct.tag}`" if struct.tag else struct.title.removeprefix("the ").capitalize()
    lines = [f"{heading} {name}", "", inspect.getdoc(cls) or "", ""]
    fields = [*struct.fields.values(), *([struct.sugar] if struct.sugar else [])]
    if not fields:
        return lines
    comments = field_comments(cls)
    lines += ["| field | value | default | meaning |", "|---|---|---|---|"]
    for field in fields:
        key, value = f"`{field.name}`", _BOUNDS.sub(r" of at least \1", expected(field.shape))
        if isinstance(field.shape, OneOf):
            value = f"{article(field.shape.title)} {field.shape.title}"
            key = " or ".join(f"`{tag}`" for tag in field.shape.by_tag) if field.inline else key
        lines.append(f"| {key} | {value} | {_default(field)} | {comments.get(field.name, '')} |")
    return [*lines, ""]


def _default(field: Field) -> str:
    if field.required:
        return "required"
    if field.default is None and not isinstance(field.shape, WordOr):
        return ""
    return f"`{value_text(field.default, field.shape)}`"


if __name__ == "__main__":
    print(as_markdown(), end="")
