"""What a block of a golden case runs, by its name.  One line per pass; loaded when a case asks for it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

FILE = "case.ir"  # the name of the policy text in every expected block

# block name -> "module:function"; the function takes the policy text and returns the block
PASSES: dict[str, str] = {
    "errors": "support.language_passes:errors",
    "file": "support.language_passes:file",
    "terminal": "support.language_passes:terminal",
    "concise": "support.language_passes:concise",
    "print": "support.language_passes:printed",
    "verify": "support.language_passes:verify",
    "resolve": "support.lowering_passes:resolve",
    "budget": "support.lowering_passes:budget",
    "layout": "support.lowering_passes:layout",
    "kernels": "support.lowering_passes:kernels",
    "buckets": "support.lowering_passes:buckets",
    "cost": "support.lowering_passes:cost",
    "serve": "support.lowering_passes:serve",
    "stage": "support.lowering_passes:stage",
    "model": "support.lowering_passes:model",
    "plan": "support.lowering_passes:plan",
    "moved": "support.lowering_passes:moved",
    "edited": "support.lowering_passes:edited",
}


def run(name: str, policy: bytes) -> str:
    """The text of a block, ending with a line break."""
    assert name in PASSES, f"no pass `{name}`; tests/support/passes.py has {', '.join(PASSES)}"
    module, _, function = PASSES[name].partition(":")
    call: Callable[[bytes], str] = getattr(import_module(module), function)
    text = call(policy)
    return text if text.endswith("\n") else text + "\n"
