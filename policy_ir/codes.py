"""Every code that a diagnostic can carry: what it says, why, an example, and what to write instead.

`kvir explain KV020` prints one; docs/errors.md is made of all of them.
"""

from __future__ import annotations

from msgspec import Struct


class Code(Struct, frozen=True):
    """The four texts of a code; `example` and `instead` are pieces of a policy file, or a command."""

    title: str
    what: str
    why: str
    example: str
    instead: str


def codes() -> dict[str, Code]:
    """All codes in order."""
    # separate tables, so that the texts are loaded only when somebody asks
    from kvir.policy_ir.codes_lowering import LOWERING
    from kvir.policy_ir.codes_policy import POLICY
    from kvir.policy_ir.codes_text import TEXT

    return dict(sorted({**TEXT, **POLICY, **LOWERING}.items()))


def explain(name: str, columns: int | None = None) -> str:
    """The page of one code, for a terminal of so many columns; without a width, paragraphs are one line.

    Raises:
        KeyError: no such code; the message names the nearest one.
    """
    table = codes()
    code = table.get(name.upper())
    if code is None:
        from kvir.policy_ir.describe import closest

        guess = closest(name.upper(), table)
        raise KeyError(
            f"no code {name}" + (f"; did you mean {guess}?" if guess else f"; try {next(iter(table))}")
        )
    parts = [f"{name.upper()}: {code.title}", code.what, code.why]
    if columns is not None:
        import textwrap

        parts = [textwrap.fill(part, columns, break_on_hyphens=False) for part in parts]
    parts += ["Refused:\n" + _indented(code.example), "Instead:\n" + _indented(code.instead)]
    return "\n\n".join(parts) + "\n"


def as_markdown() -> str:
    """docs/errors.md."""
    lines = [
        "# Diagnostics",
        "",
        "Made from the tables in `policy_ir/codes*.py` by `python -m kvir.policy_ir.codes > docs/errors.md`;",
        "change it there. `kvir explain CODE` prints one entry.",
        "",
    ]
    family = ""
    for name, code in codes().items():
        if name[:3] != family:
            family = name[:3]
            lines += [f"## {family}xx: {FAMILIES[family]}", ""]
        lines += [f"### {name}: {code.title}", "", code.what, "", code.why, "", "Refused:", ""]
        lines += ["```yaml", code.example, "```", "", "Instead:", "", "```yaml", code.instead, "```", ""]
    return "\n".join(lines)


FAMILIES = {
    "KV0": "text and shape",
    "KV1": "the policy by itself",
    "KV2": "the policy and a model",
    "KV3": "budgets",
    "KV4": "memory layout",
    "KV5": "kernels",
    "KV6": "plans and graphs",
}


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


if __name__ == "__main__":
    print(as_markdown(), end="")
