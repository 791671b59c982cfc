"""A report as text for people (rustc's shape), as one line each, and as JSON."""

from __future__ import annotations

import re
import unicodedata

import msgspec

from kvir.policy_ir.diagnostic import Diagnostic, Report, Severity
from kvir.policy_ir.source import Source, Span

LINE_COLUMNS = 110  # longer lines are cut around the caret
_UNSAFE = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)

_STYLES: dict[str, str] = {
    "error": "\x1b[1;31m",
    "warning": "\x1b[1;33m",
    "frame": "\x1b[1;34m",
    "bold": "\x1b[1m",
}


def full(report: Report, *, color: bool = False) -> str:
    """Every finding with its lines and carets, then a count; empty if there is nothing to say."""
    if not len(report):
        return ""
    painter = _Painter(color)
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
    def __init__(self, color: bool) -> None:
        self._color = color

    def paint(self, style: str, text: str) -> str:
        return f"{_STYLES[style]}{text}\x1b[0m" if self._color and text else text

    def bold(self, text: str) -> str:
        return self.paint("bold", text)

    def frame(self, text: str) -> str:
        return self.paint("frame", text)


def _block(d: Diagnostic, source: Source, painter: _Painter) -> str:
    head = painter.paint(d.severity, f"{d.severity}[{d.code}]") + painter.bold(f": {clean(d.message)}")
    marks = [(label.span, clean(label.text), "-") for label in d.labels]
    if d.span is not None:
        marks.append((d.span, clean(d.note), "^"))
    drawn = {span: source.position(span.start).line for span, _, _ in marks} if source.text else {}
    width = max((len(str(line)) for line in drawn.values()), default=1)
    bar = painter.frame(f"{' ' * width} |")
    lines = [head, painter.frame(f"{' ' * width}--> ") + _place(d.span, source)]
    shown = 0
    for span, text, caret in sorted(marks, key=lambda m: (drawn.get(m[0], 0), m[0].start, m[2])):
        if span not in drawn:
            continue
        number = drawn[span]
        snippet, offset, length = _snippet(span, source)
        if number != shown:
            if shown == 0:
                lines.append(bar)
            elif number > shown + 1:
                lines.append(painter.frame("..."))
            lines.append(painter.frame(f"{number:>{width}} | ") + snippet)
            shown = number
        style: Severity | str = d.severity if caret == "^" else "frame"
        lines.append(f"{bar} {' ' * offset}" + painter.paint(style, f"{caret * length} {text}".rstrip()))
    if shown and d.help:
        lines.append(bar)
    for text in d.help:
        lines.append(painter.frame(f"{' ' * width} = ") + painter.bold("help") + f": {clean(text)}")
    return "\n".join(lines) + "\n"


def _place(span: Span | None, source: Source) -> str:
    name = clean(source.name)
    if span is None:
        return name
    at = source.position(span.start)
    return f"{name}:{at.line}:{at.column}"


def _snippet(span: Span, source: Source) -> tuple[str, int, int]:
    """The line of a span cut to fit, with the caret's offset and length in terminal columns."""
    at = source.position(span.start)
    line = source.line(at.line)
    first = at.column - 1
    last = min(max(first + 1, first + span.end - span.start), max(len(line), first + 1))
    cut, end = 0, len(line)
    if len(line) > LINE_COLUMNS:
        cut = max(0, min(first - LINE_COLUMNS // 3, len(line) - LINE_COLUMNS))
        end = cut + LINE_COLUMNS
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
