"""Golden cases in Markdown: a heading, prose, one `policy` block, and expected blocks named after a pass.

Blocks that stand for a `policy` block which Markdown cannot hold: `bytes`, written with Python escapes, and
`repeat`, whose lines are a count and a text with escapes that is repeated so often.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

Run = Callable[[str, bytes], str]  # (pass name, policy text) -> printed result


@dataclass(frozen=True)
class Case:
    title: str
    policy: bytes
    expected: dict[str, tuple[int, int, str]]  # block name -> (start, end, text) in the file


def cases(text: str) -> Iterator[Case]:
    """Every heading that has a policy under it."""
    blocks = list(_BLOCK.finditer(text))
    headings = [
        h for h in _HEADING.finditer(text) if not any(b.start() < h.start() < b.end() for b in blocks)
    ]
    for heading, following in zip(headings, [*headings[1:], None], strict=True):
        end = following.start() if following else len(text)
        inside = {b[1]: (b.start(2), b.end(2), b[2]) for b in blocks if heading.end() <= b.start() < end}
        if "policy" in inside:
            yield Case(heading[1], inside.pop("policy")[2].encode(), inside)
        elif "bytes" in inside:
            yield Case(heading[1], _unescaped(inside.pop("bytes")[2].replace("\n", "")), inside)
        elif "repeat" in inside:
            lines = (line.partition(" ") for line in inside.pop("repeat")[2].splitlines())
            yield Case(heading[1], b"".join(_unescaped(text) * int(n) for n, _, text in lines), inside)


def _unescaped(text: str) -> bytes:
    return codecs.escape_decode(text.encode())[0]  # type: ignore[attr-defined]


def check(path: Path, title: str, run: Run, *, update: bool) -> None:
    """Compare every expected block of a case with what its pass prints; with `update`, rewrite the blocks."""
    text = path.read_text(encoding="utf-8")
    (case,) = [c for c in cases(text) if c.title == title]
    assert case.expected, f"{path.name}: `{title}` expects nothing"
    for name, (start, end, want) in reversed(case.expected.items()):
        got = run(name, case.policy)
        if update:
            text = text[:start] + got + text[end:]
        else:
            assert got == want, (
                f"{path.name}: `{title}`: block `{name}` differs.\n--- expected\n{want}--- got\n{got}---\n"
                "If the new text is right, run pytest --update-golden and read the diff."
            )
    if update:
        path.write_text(text, encoding="utf-8")
