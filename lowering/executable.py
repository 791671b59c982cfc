"""What of the language the runtime executes.  The language may know more: refused by name, never ignored."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import NODEFAULT, Struct, structs

from kvir.policy_ir.nodes import All, Policy, Recent, Rule, Sink, Windows

# The fields that lowering gives a meaning to, by struct.
EXECUTED: dict[type[Struct], frozenset[str]] = {
    Policy: frozenset({"kvir", "name", "model", "windows", "rules", "provenance"}),
    Windows: frozenset({"table", "sink"}),
    Rule: frozenset({"keep", "layers", "heads", "phase"}),
    All: frozenset(),
    Sink: frozenset({"tokens"}),
    Recent: frozenset({"tokens"}),
}


def unexecuted(policy: Policy) -> Iterator[tuple[str, str]]:
    """(word of the language, path) of everything in a policy that has no meaning for the runtime."""
    yield from _fields(policy, Policy, "$")
    if policy.windows is not None:
        yield from _fields(policy.windows, Windows, "$.windows")
    for i, rule in enumerate(policy.rules):
        yield from _fields(rule, Rule, f"$.rules[{i}]")
        for j, term in enumerate(rule.keep):
            path = f"$.rules[{i}].keep[{j}]"
            if type(term) in EXECUTED:
                yield from _fields(term, type(term), path)
            else:
                yield _tag(term), path


def _fields(value: Struct, cls: type[Struct], path: str) -> Iterator[tuple[str, str]]:
    for name, default in _others(type(value), cls):
        if getattr(value, name) != default:
            yield name, f"{path}.{name}"


@cache
def _others(cls: type[Struct], known: type[Struct]) -> tuple[tuple[str, Any], ...]:
    """Fields that lowering does not know, with the default that means "as if it were not there"."""
    return tuple(
        (f.name, f.default_factory() if f.default_factory is not NODEFAULT else f.default)
        for f in structs.fields(cls)
        if f.name not in EXECUTED[known]
    )


def _tag(term: object) -> str:
    """The word that stands for a term in the text."""
    config: object = getattr(term, "__struct_config__", None)
    return str(getattr(config, "tag", None) or type(term).__name__)
