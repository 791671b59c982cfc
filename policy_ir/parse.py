"""Text -> `Policy`, or every reason why not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from kvir.policy_ir.decode import Decoder
from kvir.policy_ir.diagnostic import PolicyError, Report
from kvir.policy_ir.nodes import Policy
from kvir.policy_ir.shape import Record
from kvir.policy_ir.source import Source
from kvir.policy_ir.yaml_tree import MAX_TEXT_BYTES, read_source

_SHAPE = Record(Policy)


class Parsed(NamedTuple):
    """The outcome of reading a text.  Later passes add to `report` with spans from `source.span(path)`."""

    policy: Policy | None  # None if there are errors
    report: Report
    source: Source


def read(text: str | bytes, name: str = "<text>") -> Parsed:
    """Decode a text.  Never raises on bad input."""
    source, report = read_source(text, name)
    policy = None
    if source.root is not None:
        value = Decoder(source, report).value(source.root, _SHAPE)
        if isinstance(value, Policy) and not report.error_count:
            policy = value
    return Parsed(policy, report, source)


def read_file(path: str | os.PathLike[str]) -> Parsed:
    """Decode a file.  A file that cannot be read is a finding like any other."""
    name = os.fspath(path)
    try:
        with Path(name).open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:
        source = Source(name, "")
        report = Report(source)
        reason = error.strerror if isinstance(error, OSError) else str(error)
        report.error("KV001", f"the file cannot be read: {reason}", None, help="check the path")
        return Parsed(None, report, source)
    return read(data, name)


def parse(text: str | bytes, name: str = "<text>") -> Policy:
    """The policy of a text.

    Raises:
        PolicyError: with every error of the text.
    """
    return _policy_of(read(text, name))


def load(path: str | os.PathLike[str]) -> Policy:
    """The policy of a file.

    Raises:
        PolicyError: with every error of the file, or that it cannot be read.
    """
    return _policy_of(read_file(path))


def _policy_of(parsed: Parsed) -> Policy:
    if parsed.policy is None:
        raise PolicyError(parsed.report)
    return parsed.policy
