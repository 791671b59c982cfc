"""Golden blocks of the language: what is wrong with a text, and how it prints."""

from __future__ import annotations

from kvir.policy_ir import print_policy, read, read_file, render
from support.passes import FILE


def errors(policy: bytes) -> str:
    return render.full(read(policy, FILE).report) or "none"


def file(name: bytes) -> str:
    """Reads the file of that name."""
    return render.full(read_file(name.decode().strip()).report) or "none"


def terminal(policy: bytes) -> str:
    """As `errors`, in a terminal of 80 columns."""
    return render.full(read(policy, FILE).report, columns=80) or "none"


def concise(policy: bytes) -> str:
    return render.concise(read(policy, FILE).report) or "none"


def printed(policy: bytes) -> str:
    parsed = read(policy, FILE)
    return print_policy(parsed.policy) if parsed.policy is not None else render.full(parsed.report)


def verify(policy: bytes) -> str:
    from kvir.lowering.verify import Verify

    parsed = read(policy, FILE)
    if parsed.policy is not None:
        Verify(parsed.report)(parsed.policy)
    return render.full(parsed.report) or "none"
