"""What `--kv-ir` does not go together with.  The server refuses to start and says why and what to do instead.

Fail closed: a feature that moves, copies, quantises or re-reads KV rows past the residency table would
silently serve wrong rows.  `check_raw` looks at the arguments as given, before anything else;
`check_resolved` at what SGLang made of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvir.lowering.stages import ExecutionPlan
from kvir.sglang_ext.errors import KvirError
from kvir.sglang_ext.ranks import cannot_be_split

if TYPE_CHECKING:
    from kvir.sglang_ext.server_args import KvirServerArgs

PAGE_TOKENS = 16
BACKEND = "kvir"
_OTHER_RANKS = "use --tp-size 1, another number of ranks, or rules whose heads select by themselves"


@dataclass(frozen=True)
class Refusal:
    """Fields of ServerArgs, the values that kvir accepts for them, and why no others."""

    why: str
    accepts: Callable[[Any], bool]
    fields: tuple[str, ...]
    remedy: str = "leave it out"


def _is(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value in allowed


def _off(value: Any) -> bool:
    return not value


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "rolled-back drafts would need rows that a policy has dropped", _is(None), ("speculative_algorithm",)
    ),
    Refusal("KV transfer between servers reads dense buffers", _is("null", None), ("disaggregation_mode",)),
    Refusal("layers are not split over ranks yet", _is(1), ("pp_size",), "use --pp-size 1"),
    Refusal("ranks would have other requests", _off, ("enable_dp_attention",)),
    Refusal(
        "replicas in one process are not tested",
        _is(1),
        ("dp_size",),
        "start several servers behind a router",
    ),
    Refusal("context parallelism spreads one sequence over ranks", _is(1), ("dcp_size", "attn_cp_size")),
    Refusal("requests end their residency through the prefix tree", _off, ("disable_radix_cache",)),
    Refusal("a chunk and a decode step read different versions of the table", _off, ("enable_mixed_chunk",)),
    Refusal(
        "quantised rows are not supported yet",
        _is("auto", "float32", "bfloat16", "bf16"),
        ("kv_cache_dtype",),
        "use --kv-cache-dtype auto",
    ),
    Refusal(
        "it copies dense pages",
        _off,
        (
            "enable_hierarchical_cache",
            "enable_lmcache",
            "enable_flexkv",
            "enable_unified_cache_external_linker",
        ),
    ),
    Refusal(
        "it manages the same memory",
        _off,
        (
            "enable_hisparse",
            "enable_unified_memory",
            "enable_page_major_kv_layout",
            "enable_kv_cache_sharding",
            "enable_memory_saver",
            "prefill_only_disable_kv_cache",
        ),
    ),
    Refusal(
        "sessions keep rows that a policy may drop",
        _off,
        ("enable_session_radix_cache", "enable_streaming_session"),
    ),
    Refusal(
        "two batches would share one version of the table", _off, ("enable_two_batch_overlap", "enable_pdmux")
    ),
    Refusal("preemption is not tested yet", _off, ("enable_priority_scheduling",)),
    Refusal("diffusion decoding rewrites rows", _is(None), ("dllm_algorithm",)),
    Refusal("such a server decodes nothing", _off, ("encoder_only", "is_embedding")),
    Refusal("it demands attention backends of its own", _off, ("enable_deterministic_inference",)),
    Refusal(
        "the plan chooses the kernels",
        _is(None, BACKEND),
        ("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    ),
    Refusal("prefix validity follows the plan", _is(None, BACKEND), ("radix_cache_backend",)),
    Refusal(
        f"a logical page holds {PAGE_TOKENS} tokens",
        _is(None, PAGE_TOKENS),
        ("page_size",),
        f"use --page-size {PAGE_TOKENS}",
    ),
)


def check_raw(args: KvirServerArgs) -> None:
    """Raises KvirError before anything is loaded: flags that do not go together, or a plan file that is not
    there.
    """
    _check(lambda field: getattr(args, field))
    path = str(args.kv_ir)
    if not Path(path).is_file():
        raise KvirError(f"error: --kv-ir {path}: no such file")


def check_resolved(config: Any) -> None:
    """The same questions, asked of what resolution made of the arguments."""
    _check(lambda field: getattr(config, field))
    if config.enable_torch_compile:
        _check_compiling(config)


def _check_compiling(config: Any) -> None:
    flag = flag_of("enable_torch_compile")
    if config.device != "cpu":
        raise KvirError(_clash(f"{flag} on a GPU", "torch would trace launches of kernels", "leave it out"))
    if config.tp_size > 1:
        raise KvirError(_clash(f"{flag} on several ranks", "it is not tested there", "use --tp-size 1"))


def check_ranks(plan: ExecutionPlan, tp_size: int) -> None:
    """Raises KvirError if the heads of a plan cannot be spread over that many ranks."""
    found = [_clash(f"--tp-size {tp_size}", why, _OTHER_RANKS) for why in cannot_be_split(plan, tp_size)]
    if found:
        raise KvirError("\n".join(found))


def _check(value_of: Callable[[str], Any]) -> None:
    found = [
        _clash(flag_of(field), refusal.why, refusal.remedy)
        for refusal in REFUSALS
        for field in refusal.fields
        if not refusal.accepts(value_of(field))
    ]
    if found:
        raise KvirError("\n".join(found))


def _clash(what: str, why: str, remedy: str) -> str:
    return f"error: --kv-ir does not go together with {what}: {why}\n  help: {remedy}"


def flag_of(field: str) -> str:
    return "--" + field.replace("_", "-")
