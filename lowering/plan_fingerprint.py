"""The identity of a plan: two plans with one fingerprint keep the same rows of the same model in the same
pages.
"""

from __future__ import annotations

import hashlib

import msgspec

from kvir.lowering.stages import LayoutPlan

PLAN_FORMAT = 1  # of ExecutionPlan as JSON; raise it when a stage type changes


def plan_fingerprint(layout: LayoutPlan) -> str:
    """SHA-256 over policy, model and layout.  Kernels are left out: they compute the same."""
    data = msgspec.json.encode([PLAN_FORMAT, layout], order="deterministic")
    return hashlib.sha256(data).hexdigest()
