"""The layout of canonical text: a document of keys, values and comments -> lines.

A part goes on one line if it fits and holds no comment, else one line per entry or item.  Both the printer of
structs and the formatter of texts build documents, so they agree.
"""

from __future__ import annotations

import json
import re

from msgspec import Struct, field

LINE_COLUMNS = 100
INDENT = "  "

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_+./-]*( [A-Za-z0-9_+(./-][A-Za-z0-9_+)./-]*)*")
_RESERVED = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}


class Notes(Struct):
    """Comments of one entry or item: on the lines before it, after its key, and at its end."""

    before: list[str] = field(default_factory=list[str])
    head: str | None = None
    end: str | None = None


class Leaf(Struct):
    """A value on one line."""

    text: str


class Items(Struct):
    """A list; `apart` puts each item on its own line always."""

    items: list[tuple[Doc, Notes]]
    apart: bool = False


class Entries(Struct):
    """A mapping; `bare` drops the braces of a single entry that is an item of a list."""

    entries: list[tuple[str, Doc, Notes]]
    apart: bool = False
    bare: bool = False


Doc = Leaf | Items | Entries


def layout(doc: Entries, header: list[str] | None = None, footer: list[str] | None = None) -> str:
    """The text of a whole document; `header` and `footer` are comments around it."""
    return "".join(f"{line}\n" for line in [*(header or ()), *_entries(doc, LINE_COLUMNS), *(footer or ())])


def one_line(doc: Doc) -> str:
    """The document in flow style, comments left out."""
    match doc:
        case Leaf():
            return doc.text
        case Items():
            return f"[{', '.join(one_line(item) for item, _ in doc.items)}]"
        case Entries():
            return "{" + ", ".join(f"{key}: {one_line(value)}" for key, value, _ in doc.entries) + "}"


def quoted(text: str) -> str:
    """Text as YAML reads it back: plain if that is safe, else in double quotes."""
    if _PLAIN.fullmatch(text) and text.lower() not in _RESERVED:
        return text
    return json.dumps(text, ensure_ascii=False)


# ---- lines -------------------------------------------------------------------------------------------------


def _entries(doc: Entries, columns: int) -> list[str]:
    lines: list[str] = []
    for key, value, notes in doc.entries:
        lines += notes.before
        text = f"{key}: {one_line(value)}"
        if isinstance(value, Leaf) or (len(text) <= columns and _on_one_line(value) and notes.head is None):
            lines.append(_noted(text, notes))
        else:
            lines.append(f"{key}:" + (f"  {notes.head}" if notes.head else ""))
            lines += [INDENT + line for line in _block(value, columns - len(INDENT))]
            lines += [notes.end] if notes.end else []
    return lines


def _block(doc: Doc, columns: int) -> list[str]:
    match doc:
        case Leaf():
            return [doc.text]
        case Items():
            return [line for item, notes in doc.items for line in _item(item, notes, columns)]
        case Entries():
            return _entries(doc, columns)


def _item(doc: Doc, notes: Notes, columns: int) -> list[str]:
    text = one_line(doc)
    if isinstance(doc, Entries) and doc.bare and len(doc.entries) == 1:
        text = text[1:-1]
    row = isinstance(doc, Items) and all(isinstance(item, Leaf) for item, _ in doc.items)
    short = row or len(text) + len("- ") <= columns  # a row of a table stays one line
    if isinstance(doc, Leaf) or (short and _on_one_line(doc) and notes.head is None):
        return [*notes.before, _noted(f"- {text}", notes)]
    first, *others = _block(doc, columns - len("- "))
    below = [f"- {first}", *(f"  {line}" for line in others)]
    if notes.head is not None:
        below = ["- " + notes.head, *(f"  {line}" for line in (first, *others))]
    return [*notes.before, *below, *([notes.end] if notes.end else [])]


def _on_one_line(doc: Doc) -> bool:
    """Whether nothing inside asks for lines of its own."""
    match doc:
        case Leaf():
            return True
        case Items():
            return not (doc.apart and doc.items) and all(_quiet(n) and _on_one_line(d) for d, n in doc.items)
        case Entries():
            return not (doc.apart and doc.entries) and all(
                _quiet(n) and _on_one_line(d) for _, d, n in doc.entries
            )


def _quiet(notes: Notes) -> bool:
    return not notes.before and notes.head is None and notes.end is None


def _noted(text: str, notes: Notes) -> str:
    return f"{text}  {notes.end}" if notes.end else text
