"""Proof, before the first request, that everything is bound.

SGLang logs plugin errors and goes on; a hook that did not bind would leave a server that accepts `--kv-ir`
and ignores it. The attention backend and the tree are chosen by name, so a plugin that did not load at all
already stops the server; this check covers the rest, and raises in the scheduler process, which ends the
server.
"""

from __future__ import annotations

import inspect
import pkgutil
from typing import TYPE_CHECKING, Any

from kvir.kernels import dispatch
from kvir.kernels.proof import Shapes, disagreements
from kvir.kernels.proof_selecting import wrong_copies, wrong_sums, wrong_trigger
from kvir.sglang_ext.hooks import HOOKS, SRT, Hook

if TYPE_CHECKING:
    from kvir.sglang_ext.pool import KvirPool

ANY_LOGIT_CAP = 30.0  # the proof's, for models that have one


def unbound_hooks() -> list[str]:
    """Targets in the table whose current attribute does not lead to our function."""
    return [hook.target for hook in HOOKS if not _is_bound(hook)]


def _is_bound(hook: Hook) -> bool:
    try:
        function = pkgutil.resolve_name(SRT + hook.target)
    except (ImportError, AttributeError):
        return False
    while function is not None:
        closure = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        if closure.get("hook") is hook.function:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def shapes_of(pool: KvirPool, *, whole: bool = False) -> Shapes:
    """Those of the plan's layers."""
    layout, facts = pool.own, pool.plan.model
    return Shapes(
        query_heads=layout.query_heads,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        page_rows=layout.page_tokens,
        dtype=pool.kv.dtype,
        scale=layout.head_dim**-0.5,
        logit_cap=ANY_LOGIT_CAP if "logit_cap" in facts.needs else 0.0,
        biased=pool.bias is not None,
        whole=whole,
    )


def check_kernels(pool: KvirPool, name: str) -> None:
    """Raises RuntimeError if the kernels called `name` are wrong here, in the shapes of the plan."""
    shapes, device = shapes_of(pool), pool.kv.device
    found = disagreements(dispatch.get(name), shapes, device)
    if pool.sums_name not in ("", "ref"):
        found += wrong_sums(dispatch.sums(pool.sums_name), shapes, device)
    if pool.copies_name not in ("", "ref"):
        found += wrong_copies(dispatch.copies(pool.copies_name), shapes, device)
    if pool.selects_on_device:
        found += wrong_trigger(shapes, device)
    if found:
        raise RuntimeError(
            f"kvir: refusing to serve: kernels {name!r} on {pool.kv.device}: " + "; ".join(found)
        )


def check_scheduler(scheduler: Any) -> None:
    """Raises RuntimeError with everything that is not as it must be."""
    from kvir.sglang_ext.allocator import KvirAllocator
    from kvir.sglang_ext.backend import KvirAttentionBackend
    from kvir.sglang_ext.pool import KvirPool
    from kvir.sglang_ext.prefix import KvirRadixCache

    runner = scheduler.tp_worker.model_runner
    found = [f"hook on {target} is not bound" for target in unbound_hooks()]
    expected = (
        ("KV pool", runner.token_to_kv_pool, KvirPool),
        ("allocator", runner.token_to_kv_pool_allocator, KvirAllocator),
        ("scheduler's allocator", scheduler.token_to_kv_pool_allocator, KvirAllocator),
        ("attention backend", runner.attn_backend, KvirAttentionBackend),
        ("prefix tree", scheduler.tree_cache, KvirRadixCache),
    )
    found += [
        f"the {what} is a {type(value).__name__}, not a {kind.__name__}"
        for what, value, kind in expected
        if not isinstance(value, kind)
    ]
    if found:
        raise RuntimeError("kvir: refusing to serve: " + "; ".join(found))
