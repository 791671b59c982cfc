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

from kvir.sglang_ext.errors import KvirError

if TYPE_CHECKING:
    from kvir.sglang_ext.server_args import KvirServerArgs

PAGE_TOKENS = 16
BACKEND = "kvir"


@dataclass(frozen=True)
class Refusal:
    """One field of ServerArgs and the values that kvir accepts."""

    field: str
    flag: str
    accepts: Callable[[Any], bool]
    why: str
    remedy: str


def _is(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value in allowed


def _off(value: Any) -> bool:
    return not value


_DROP = "leave it out"

REFUSALS: tuple[Refusal, ...] = (
    Refusal("speculative_algorithm", "--speculative-algorithm", _is(None), "rolled-back drafts would need rows that a policy has dropped", _DROP),
    Refusal("disaggregation_mode", "--disaggregation-mode", _is("null", None), "KV transfer between servers reads dense buffers", _DROP),
    Refusal("tp_size", "--tp-size", _is(1), "heads are not split over ranks yet", "use --tp-size 1"),
    Refusal("pp_size", "--pp-size", _is(1), "layers are not split over ranks yet", "use --pp-size 1"),
    Refusal("dp_size", "--dp-size", _is(1), "data parallelism is not tested", "start several servers behind a router"),
    Refusal("dcp_size", "--dcp-size", _is(1), "context parallelism spreads one sequence over ranks", _DROP),
    Refusal("attn_cp_size", "--attn-cp-size", _is(1), "context parallelism spreads one sequence over ranks", _DROP),
    Refusal("disable_radix_cache", "--disable-radix-cache", _off, "requests end their residency through the prefix tree", "leave it out; the prefix cache costs nothing that is needed"),
    Refusal("enable_mixed_chunk", "--enable-mixed-chunk", _off, "a chunk and a decode step read different versions of the table", _DROP),
    Refusal("kv_cache_dtype", "--kv-cache-dtype", _is("auto", "float32", "bfloat16", "bf16"), "quantised rows are not supported yet", "use --kv-cache-dtype auto"),
    Refusal("enable_hierarchical_cache", "--enable-hierarchical-cache", _off, "host copies are made of dense pages", _DROP),
    Refusal("enable_hisparse", "--enable-hisparse", _off, "it manages the same memory", _DROP),
    Refusal("enable_lmcache", "--enable-lmcache", _off, "it copies dense pages", _DROP),
    Refusal("enable_flexkv", "--enable-flexkv", _off, "it copies dense pages", _DROP),
    Refusal("enable_unified_cache_external_linker", "--enable-unified-cache-external-linker", _off, "it copies dense pages", _DROP),
    Refusal("enable_unified_memory", "--enable-unified-memory", _off, "it owns the pool", _DROP),
    Refusal("enable_page_major_kv_layout", "--enable-page-major-kv-layout", _off, "the layout comes from the plan", _DROP),
    Refusal("enable_kv_cache_sharding", "--enable-kv-cache-sharding", _off, "the layout comes from the plan", _DROP),
    Refusal("enable_memory_saver", "--enable-memory-saver", _off, "it re-maps buffers that the table points into", _DROP),
    Refusal("prefill_only_disable_kv_cache", "--prefill-only-disable-kv-cache", _off, "there would be no cache to manage", _DROP),
    Refusal("enable_session_radix_cache", "--enable-session-radix-cache", _off, "sessions keep rows that a policy may drop", _DROP),
    Refusal("enable_streaming_session", "--enable-streaming-session", _off, "sessions keep rows that a policy may drop", _DROP),
    Refusal("enable_two_batch_overlap", "--enable-two-batch-overlap", _off, "two half batches would share one table version", _DROP),
    Refusal("enable_pdmux", "--enable-pdmux", _off, "prefill and decode would run on two streams", _DROP),
    Refusal("dllm_algorithm", "--dllm-algorithm", _is(None), "diffusion decoding rewrites rows", _DROP),
    Refusal("encoder_only", "--encoder-only", _off, "an encoder has no KV cache", _DROP),
    Refusal("is_embedding", "--is-embedding", _off, "embedding requests keep no KV cache", _DROP),
    Refusal("enable_deterministic_inference", "--enable-deterministic-inference", _off, "it demands attention backends of its own", _DROP),
    Refusal("attention_backend", "--attention-backend", _is(None, BACKEND), "the plan chooses the kernels", _DROP),
    Refusal("prefill_attention_backend", "--prefill-attention-backend", _is(None, BACKEND), "the plan chooses the kernels", _DROP),
    Refusal("decode_attention_backend", "--decode-attention-backend", _is(None, BACKEND), "the plan chooses the kernels", _DROP),
    Refusal("radix_cache_backend", "--radix-cache-backend", _is(None, BACKEND), "prefix validity follows the plan", _DROP),
    Refusal("page_size", "--page-size", _is(None, PAGE_TOKENS), "a logical page is a head-page's worth of tokens", f"use --page-size {PAGE_TOKENS}"),
)  # fmt: skip


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


def _check(value_of: Callable[[str], Any]) -> None:
    found = [r for r in REFUSALS if not r.accepts(value_of(r.field))]
    if found:
        lines = [
            f"error: --kv-ir does not go together with {r.flag}: {r.why}\n  help: {r.remedy}" for r in found
        ]
        raise KvirError("\n".join(lines))
