"""The policy language: text, structs, and what is wrong with them.  No model, no device, no torch."""

from kvir.policy_ir.builder import PolicyBuilder, keep_all, recent, sink, top_k, top_p
from kvir.policy_ir.diagnostic import Diagnostic, Label, PolicyError, Report
from kvir.policy_ir.nodes import Policy, encode
from kvir.policy_ir.parse import Parsed, load, parse, read, read_file
from kvir.policy_ir.printer import print_policy
from kvir.policy_ir.source import Source, Span

__all__ = [
    "Diagnostic",
    "Label",
    "Parsed",
    "Policy",
    "PolicyBuilder",
    "PolicyError",
    "Report",
    "Source",
    "Span",
    "encode",
    "keep_all",
    "load",
    "parse",
    "print_policy",
    "read",
    "read_file",
    "recent",
    "sink",
    "top_k",
    "top_p",
]
