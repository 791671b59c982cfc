"""What is wrong with a file, as data: one `Diagnostic` each, collected in a `Report` and raised together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from kvir.policy_ir.source import Source, Span

Severity = Literal["error", "warning"]

MAX_DIAGNOSTICS = 200  # of one file; the rest is only counted
MAX_COUNTED = 10_000  # errors after which reading a file stops


class Label(Struct, frozen=True):
    """A second place that helps to see why."""

    span: Span
    text: str


class Diagnostic(Struct, frozen=True, kw_only=True):
    """One finding.  `message` stands alone in one-line mode; `note` is written at the caret."""

    code: str
    message: str
    span: Span | None  # None: about no place in the text, e.g. the file cannot be read
    note: str = ""
    severity: Severity = "error"
    labels: tuple[Label, ...] = ()
    help: tuple[str, ...] = ()


class Report:
    """Every finding about one source.  Passes add to it and go on; the caller raises once at the end."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.error_count = 0
        self.warning_count = 0
        self._found: dict[tuple[str, Span | None, str], Diagnostic] = {}

    def __iter__(self) -> Iterator[Diagnostic]:
        """In the order of the text."""
        return iter(sorted(self._found.values(), key=lambda d: (d.span or Span(0, 0), d.code)))

    def __len__(self) -> int:
        return len(self._found)

    @property
    def is_full(self) -> bool:
        """Whether further findings are only counted, so that their words are wasted."""
        return len(self._found) >= MAX_DIAGNOSTICS

    @property
    def omitted(self) -> int:
        """How many findings are counted but not kept."""
        return self.error_count + self.warning_count - len(self._found)

    def add(self, diagnostic: Diagnostic) -> None:
        key = (diagnostic.code, diagnostic.span, diagnostic.message)
        if key in self._found:
            return
        if diagnostic.severity == "error":
            self.error_count += 1
        else:
            self.warning_count += 1
        if len(self._found) < MAX_DIAGNOSTICS:
            self._found[key] = diagnostic

    def error(
        self,
        code: str,
        message: str,
        span: Span | None,
        *,
        note: str = "",
        labels: tuple[Label, ...] = (),
        help: str | tuple[str, ...] = (),
    ) -> None:
        helps = (help,) if isinstance(help, str) else help
        self.add(Diagnostic(code=code, message=message, span=span, note=note, labels=labels, help=helps))

    def warning(
        self,
        code: str,
        message: str,
        span: Span | None,
        *,
        note: str = "",
        labels: tuple[Label, ...] = (),
        help: str | tuple[str, ...] = (),
    ) -> None:
        helps = (help,) if isinstance(help, str) else help
        self.add(
            Diagnostic(
                code=code,
                message=message,
                span=span,
                note=note,
                severity="warning",
                labels=labels,
                help=helps,
            )
        )

    def raise_if_errors(self) -> None:
        if self.error_count:
            raise PolicyError(self)


class PolicyError(Exception):
    """A file was refused.  `report` holds every reason; `str()` is the full text for people."""

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.report = report

    def __str__(self) -> str:
        from kvir.policy_ir.render import full

        return full(self.report)
