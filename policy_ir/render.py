"""A report as text for people (rustc's shape), as one line each, and as JSON."""

from __future__ import annotations

import re
import textwrap
import unicodedata

import msgspec

from kvir.policy_ir.diagnostic import Diagnostic, Report, Severity
from kvir.policy_ir.source import Source, Span

LINE_COLUMNS = 110  # longer lines are cut around the caret
LEAST_COLUMNS = 40  # narrower terminals get lines of this width
_UNSAFE = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)

_STYLES: dict[str, str] = {
    "error": "\x1b[1;31m",
    "warning": "\x1b[1;33m",
    "frame": "\x1b[1;34m",
    "bold": "\x1b[1m",
}


def full(report: Report, *, color: bool = False, columns: int | None = None) -> str:
    """Every finding with its lines and carets, then a count; empty if there is nothing to say.

    `columns` is the width of the terminal; without one, messages stay on one line.
    """
    if not len(report):
        return ""
    painter = _Painter(color, None if columns is None else max(columns, LEAST_COLUMNS))
    blocks = [_block(d, report.source, painter) for d in report]
    return "\n".join([*blocks, painter.bold(_summary(report)) + "\n"])


def concise(report: Report) -> str:
    """One line each: `file:line:column: error[KV020]: message`."""
    lines = (f"{_place(d.span, report.source)}: {d.severity}[{d.code}]: {clean(d.message)}\n" for d in report)
    return "".join(lines)


def as_json(report: Report) -> str:
    """A list of objects: code, severity, message, note, file, line, column, end_line, ..., labels, help."""
    return msgspec.json.format(
        msgspec.json.encode([_record(d, report.source) for d in report]), indent=2
    ).decode()


def clean(text: str) -> str:
    """Text that cannot steer a terminal: control and direction characters become U+FFFD, tabs a space."""
    return _UNSAFE.sub("\ufffd", text.replace("\t", " "))


# ---- parts -------------------------------------------------------------------------------------------------


class _Painter:
    def __init__(self, color: bool, columns: int | None) -> None:
        self._color = color
        self._columns = columns

    def paint(self, style: str, text: str) -> str:
        return f"{_STYLES[style]}{text}\x1b[0m" if self._color and text else text

    def bold(self, text: str) -> str:
        return self.paint("bold", text)

    def frame(self, text: str) -> str:
        return self.paint("frame", text)

    def wrapped(self, text: str, indent: int) -> list[str]:
        """Text in lines that fit behind an indent; the first one has it already."""
        if self._columns is None:
            return [text]
        width = self._columns - indent
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        return [line if i == 0 else " " * indent + line for i, line in enumerate(lines)] or [text]

    def line_columns(self, gutter: int) -> int:
        """Columns for a line of the text, the marks of a cut included."""
        return LINE_COLUMNS if self._columns is None else min(LINE_COLUMNS, self._columns - gutter - 4)


def _block(d: Diagnostic, source: Source, painter: _Painter) -> str:
    label = f"{d.severity}[{d.code}]: "
    first, *more = painter.wrapped(label + clean(d.message), 2)
    head = painter.paint(d.severity, label[:-2]) + painter.bold(first[len(label) - 2 :])
    heads = [head, *map(painter.bold, more)]
    marks = [(label.span, clean(label.text), "-") for label in d.labels]
    if d.span is not None:
        marks.append((d.span, clean(d.note), "^"))
    drawn = {span: source.position(span.start).line for span, _, _ in marks} if source.text else {}
    width = max((len(str(line)) for line in drawn.values()), default=1)
    bar = painter.frame(f"{' ' * width} |")
    lines = [*heads, painter.frame(f"{' ' * width}--> ") + _place(d.span, source)]
    shown = 0
    for span, text, caret in sorted(marks, key=lambda m: (drawn.get(m[0], 0), m[0].start, m[2])):
        if span not in drawn:
            continue
        number = drawn[span]
        snippet, offset, length = _snippet(span, source, painter.line_columns(width + 3))
        if number != shown:
            if shown == 0:
                lines.append(bar)
            elif number > shown + 1:
                lines.append(painter.frame("..."))
            lines.append(painter.frame(f"{number:>{width}} | ") + snippet)
            shown = number
        style: Severity | str = d.severity if caret == "^" else "frame"
        for note in painter.wrapped(f"{caret * length} {text}".rstrip(), width + 3 + offset):
            lines.append(f"{bar} {' ' * offset}" + painter.paint(style, note.strip()))
    if shown and d.help:
        lines.append(bar)
    for text in d.help:
        first, *more = painter.wrapped(f"help: {clean(text)}", width + 9)
        lines.append(painter.frame(f"{' ' * width} = ") + painter.bold("help") + first[4:])
        lines += more
    return "\n".join(lines) + "\n"


def _place(span: Span | None, source: Source) -> str:
    name = clean(source.name)
    if span is None:
        return name
    at = source.position(span.start)
    return f"{name}:{at.line}:{at.column}"


def _snippet(span: Span, source: Source, columns: int) -> tuple[str, int, int]:
    """The line of a span cut to fit, with the caret's offset and length in terminal columns."""
    at = source.position(span.start)
    line = source.line(at.line)
    first = at.column - 1
    last = min(max(first + 1, first + span.end - span.start), max(len(line), first + 1))
    cut, end = 0, len(line)
    if len(line) > columns:
        cut = max(0, min(first - columns // 3, len(line) - columns))
        end = cut + columns
        last = min(last, max(end, first + 1))
    left, right = ("… " if cut else ""), (" …" if end < len(line) else "")
    shown = left + clean(line[cut:end]) + right
    return shown, len(left) + _columns(line[cut:first]), max(1, _columns(line[first:last]))


def _columns(text: str) -> int:
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in clean(text)
    )


def _summary(report: Report) -> str:
    parts = [
        f"{count} {word}{'' if count == 1 else 's'}"
        for count, word in ((report.error_count, "error"), (report.warning_count, "warning"))
        if count
    ]
    more = f" ({report.omitted} not shown)" if report.omitted else ""
    return f"{clean(report.source.name)}: {', '.join(parts)}{more}"


def _record(d: Diagnostic, source: Source) -> dict[str, object]:
    return {
        "code": d.code,
        "severity": d.severity,
        "message": d.message,
        "note": d.note,
        "file": source.name,
        **_range(d.span, source),
        "labels": [{"text": label.text, **_range(label.span, source)} for label in d.labels],
        "help": list(d.help),
    }


def _range(span: Span | None, source: Source) -> dict[str, int]:
    if span is None:
        return {}
    start, end = source.position(span.start), source.position(span.end)
    return {"line": start.line, "column": start.column, "end_line": end.line, "end_column": end.column}
