"""Bytes -> checked text -> a tree of nodes with spans.

The subset of YAML that a policy needs: one document, block and flow collections, plain and quoted scalars.
Anchors, aliases, tags and directives are refused, so a small text cannot grow and nothing is ever
constructed.  JSON is a part of the subset.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, cast

import yaml

from kvir.policy_ir.diagnostic import Label, Report
from kvir.policy_ir.source import Broken, Mapping, Scalar, Sequence, Source, Span, Tree

MAX_TEXT_BYTES = 1 << 19  # the slowest text of that size takes 0.8 s
MAX_DEPTH = 32
MAX_REPORTED_CHARACTERS = 10

# controls but tab and line breaks; the YAML 1.1 breaks NEL, LS, PS; direction marks; surrogates; BOM
_FORBIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)

# libyaml's parser where PyYAML has it: ten times faster, same events
_yaml = cast("Any", yaml)
_LOADER = getattr(_yaml, "CSafeLoader", _yaml.SafeLoader)


def read_source(data: bytes | str, name: str) -> tuple[Source, Report]:
    """Text and tree of a policy; `source.root` is None if the text could not be read to its end."""
    text, report = _read_text(data, name)
    if text is not None:
        report.source.root = _compose(text, report)
    return report.source, report


# ---- characters --------------------------------------------------------------------------------------------


def _read_text(data: bytes | str, name: str) -> tuple[str | None, Report]:
    size = len(data) if isinstance(data, bytes) else len(data.encode("utf-8", "surrogatepass"))
    if size > MAX_TEXT_BYTES:
        report = Report(Source(name, ""))
        report.error(
            "KV002",
            f"the text has {size} bytes; the limit is {MAX_TEXT_BYTES}",
            Span(0, 0),
            help="a policy is a short file; a windows table of 200 layers with 128 heads is about 150 kB",
        )
        return None, report
    try:
        text = data if isinstance(data, str) else data.decode("utf-8")
    except UnicodeDecodeError as error:
        assert isinstance(data, bytes)
        start = len(data[: error.start].decode("utf-8"))
        report = Report(Source(name, data.decode("utf-8", "replace")))
        report.error(
            "KV003",
            f"the text is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}",
            Span(start, start + 1),
            help="save the file as UTF-8",
        )
        return None, report
    report = Report(Source(name, text))
    if text.startswith("\ufeff"):
        report.error(
            "KV004",
            "the text begins with a byte order mark",
            Span(0, 1),
            help="save the file as UTF-8 without BOM",
        )
    for count, found in enumerate(_FORBIDDEN.finditer(text, 1 if report.error_count else 0)):
        if count == MAX_REPORTED_CHARACTERS:
            break
        report.error(
            "KV005",
            f"the character U+{ord(found[0]):04X} is not allowed in a policy",
            Span(*found.span()),
            help="remove it; only printable characters, tabs and line breaks are text",
        )
    return (None if report.error_count else text), report


# ---- structure ---------------------------------------------------------------------------------------------


def _compose(text: str, report: Report) -> Tree | None:
    events: Iterable[Any] = _yaml.parse(text, Loader=_LOADER)
    try:
        root = _Composer(report).tree(events)
    except yaml.MarkedYAMLError as error:
        _report_syntax(error, text, report)
        return None
    if root is None and not report.error_count:
        report.error(
            "KV007",
            "the file holds no policy",
            Span(0, 0),
            help="the least policy is `kvir: 1` and `name: my-policy`",
        )
    return root


def _report_syntax(error: yaml.MarkedYAMLError, text: str, report: Report) -> None:
    mark = cast("Any", error.problem_mark or error.context_mark)
    if "nesting" in (error.problem or ""):
        report.error("KV011", f"nested more than {MAX_DEPTH} deep", Span(mark.index, mark.index + 1))
        return
    at = min(mark.index, len(text)) if mark is not None else 0
    begin = cast("Any", error.context_mark)
    labels = (
        ()
        if begin is None or begin.index >= at
        else (Label(Span(begin.index, begin.index + 1), "begins here"),)
    )
    context = f"{error.context}: " if error.context else ""
    help: tuple[str, ...] = ()
    if text[at : at + 1] == "\t":
        help = ("indent with spaces; YAML does not take tabs",)
    elif "mapping values are not allowed" in (error.problem or ""):
        help = ("put `key: value` pairs inside `{...}`, or quote text that holds `: `",)
    report.error(
        "KV006", f"the text is not YAML: {context}{error.problem}", Span(at, at + 1), labels=labels, help=help
    )


class _Composer:
    """Builds the tree from parser events, without recursion."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._root: Tree | None = None
        self._open: list[tuple[Sequence | Mapping, bool]] = []  # (collection, flow style)
        self._keys: list[
            Tree | None
        ] = []  # of each open collection: a mapping's key that waits for its value

    def tree(self, events: Iterable[Any]) -> Tree | None:
        documents = 0
        for event in events:
            start, end = event.start_mark.index, event.end_mark.index
            match event:
                case yaml.ScalarEvent():
                    self._check(event, start, end)
                    self._place(Scalar(start, end, event.value, not event.style))
                case yaml.SequenceStartEvent() | yaml.MappingStartEvent():
                    self._check(event, start, end)
                    if len(self._open) == MAX_DEPTH:
                        self._report.error(
                            "KV011", f"nested more than {MAX_DEPTH} deep", Span(start, start + 1)
                        )
                        return None
                    is_sequence = isinstance(event, yaml.SequenceStartEvent)
                    node = Sequence(start, end, []) if is_sequence else Mapping(start, end, [])
                    self._place(node)
                    self._open.append((node, bool(event.flow_style)))
                    self._keys.append(None)
                case yaml.SequenceEndEvent() | yaml.MappingEndEvent():
                    self._close(end)
                case yaml.AliasEvent():
                    self._refuse_anchor(start, end, "an alias")
                    self._place(Broken(start, end))
                case yaml.DocumentStartEvent():
                    documents += 1
                    if documents > 1:
                        self._report.error(
                            "KV008",
                            "a second document begins here",
                            Span(start, max(end, start + 1)),
                            help="a file holds one policy; put the other into its own file",
                        )
                        return self._root
                    if event.version or event.tags:
                        self._report.error(
                            "KV010",
                            "YAML directives are not allowed",
                            Span(start, start + 1),
                            help="remove the line",
                        )
                case _:
                    pass
        return self._root

    def _place(self, node: Tree) -> None:
        if not self._open:
            self._root = node
            return
        parent = self._open[-1][0]
        if isinstance(parent, Sequence):
            parent.items.append(node)
        elif (key := self._keys[-1]) is None:
            self._keys[-1] = node
        else:
            parent.entries.append((key, node))
            self._keys[-1] = None

    def _close(self, end: int) -> None:
        node, flow = self._open.pop()
        self._keys.pop()
        # a block collection ends where its last part ends, not where the parser noticed
        last = node.items[-1:] if isinstance(node, Sequence) else [v for _, v in node.entries[-1:]]
        node.end = end if flow or not last else max(last[0].end, node.start)

    def _check(self, event: Any, start: int, end: int) -> None:
        if event.anchor is not None:
            self._refuse_anchor(start, end, "an anchor")
        if event.tag is not None:
            self._report.error(
                "KV010",
                f"the tag `{event.tag[:40]}` is not allowed",
                Span(start, max(end, start + 1)),
                help="remove the tag; each field knows its own type",
            )

    def _refuse_anchor(self, start: int, end: int, what: str) -> None:
        self._report.error(
            "KV009",
            f"{what} is not allowed in a policy",
            Span(start, max(end, start + 1)),
            help="write the value out where it is used",
        )
