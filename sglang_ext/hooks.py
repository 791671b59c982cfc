"""Every place where kvir touches SGLang 0.5.23, in one table.  Audit this file.

Method hooks go through SGLang's own HookRegistry; resolution hooks, the attention backend and the tree
through its own registries.  A hook does nothing when the server was started without `--kv-ir`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

NAME = "kvir"
SRT = "sglang.srt."
WHOLE_PROMPTS = 1 << 40  # tokens of a chunk, where prompts are not cut
DEBUG_VARIABLE = "KVIR_DEBUG"  # poison freed head-pages, look for NaN, recount after every step


@dataclass(frozen=True)
class Hook:
    target: str  # path below sglang.srt
    kind: Literal["around", "after"]
    function: Callable[..., Any]
    why: str


def _plan() -> Any:
    from kvir.sglang_ext.server_args import stored_plan

    return stored_plan()


# ---- memory ------------------------------------------------------------------------------------------------


def size_pool(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    config = original(self, *args, **kwargs)
    plan = _plan()
    if plan is None:
        return config
    page = plan.layout.page_tokens
    physical = config.max_total_num_tokens // page * page
    return dataclasses.replace(config, max_total_num_tokens=physical * plan.layout.logical_ratio)


def build_pool(
    original: Callable[..., Any], self: Any, *, sizes: Any, req_to_token_pool: Any, **kwargs: Any
) -> Any:
    plan = _plan()
    if plan is None:
        return original(self, sizes=sizes, req_to_token_pool=req_to_token_pool, **kwargs)
    from sglang.srt.runtime_context import get_parallel

    from kvir.sglang_ext.pool import KvirPool
    from kvir.sglang_ext.ranks import Ranks

    parallel = get_parallel()
    return KvirPool(
        plan,
        logical_tokens=sizes.max_total_num_tokens,
        physical_tokens=sizes.max_total_num_tokens // plan.layout.logical_ratio,
        shadow_rows=req_to_token_pool.req_to_token.shape[0],
        dtype=self.kv_cache_dtype,
        device=self.device,
        ranks=Ranks(parallel.attn_tp_size, parallel.attn_tp_rank),
    )


def build_allocator(
    original: Callable[..., Any], self: Any, *, sizes: Any, token_to_kv_pool: Any, **kwargs: Any
) -> Any:
    if _plan() is None:
        return original(self, sizes=sizes, token_to_kv_pool=token_to_kv_pool, **kwargs)
    from kvir.sglang_ext.allocator import KvirAllocator

    return KvirAllocator(
        sizes.max_total_num_tokens,
        self.kv_cache_dtype,
        self.device,
        token_to_kv_pool,
        need_sort=False,
        debug=os.environ.get(DEBUG_VARIABLE) == "1",
        chunk_tokens=_chunk_tokens(self.server_args),
    )


def _chunk_tokens(args: Any) -> int:
    size = args.chunked_prefill_size
    return size if size is not None and size > 0 else WHOLE_PROMPTS


# ---- scheduling --------------------------------------------------------------------------------------------


def prepare_allocation(_result: Any, batch: Any) -> None:
    prepare = getattr(batch.token_to_kv_pool_allocator, "prepare", None)
    if prepare is not None:
        prepare(batch)


def tell_budget(original: Callable[..., Any], self: Any, req: Req, *args: Any, **kwargs: Any) -> Any:
    from kvir.sglang_ext.admission import KvirPrefillBudget, shared_credit

    budget = self.memory_budget
    if isinstance(budget, KvirPrefillBudget):
        budget.new_token_ratio = self.new_token_ratio
        budget.credit_head_pages = budget.no_head_pages
        if req.prefix_len:
            ids = budget.tree_cache.prefix_device_indices(req)[: req.prefix_len : budget.page_size]
            budget.credit_head_pages = shared_credit(budget, (ids // budget.page_size).cpu().numpy())
    return original(self, req, *args, **kwargs)


def new_request(_result: Any, self: Req, *_args: Any, **_kwargs: Any) -> None:
    plan = _plan()
    if plan is None:
        return
    self.extra_key = f"{self.extra_key or ''}|{NAME}:{plan.fingerprint[:16]}"
    if (self.sampling_params.beam_width or 1) > 1:
        self.set_finish_with_abort("kvir: beam search is not supported with --kv-ir; leave beam_width out")


def cap_match(original: Callable[..., int], self: Req, input_len: int, *args: Any, **kwargs: Any) -> int:
    longest = original(self, input_len, *args, **kwargs)
    cap = _match_cap()
    if cap is None:
        return longest
    at_end, in_decode, in_blocks, selections = cap
    observed = in_decode
    if selections.runs(input_len):
        if at_end is None:
            return 0
        observed = max(observed, at_end)
        first = selections.first_drop(input_len)
        if first < input_len:
            longest = min(longest, first - in_blocks)
    # a negative length would be read as one from the end
    return max(0, min(longest, input_len - observed))


@functools.cache
def _match_cap() -> tuple[int | None, int, int, Any] | None:
    from kvir.sglang_ext.folding import Selections
    from kvir.sglang_ext.selecting_rules import (
        observed_at_prompt_end,
        observed_in_blocks,
        observed_in_decode,
    )

    plan = _plan()
    if plan is None or not plan.layout.compact:
        return None
    observed = observed_at_prompt_end(plan), observed_in_decode(plan), observed_in_blocks(plan)
    return *observed, Selections(plan.layout)


def settle_triggers(_result: Any, self: Any, *_args: Any, **_kwargs: Any) -> None:
    after = getattr(getattr(self, "attn_backend", None), "after_forward", None)
    if after is not None:
        after()


# ---- evidence ----------------------------------------------------------------------------------------------


def add_internal_state(result: Any, self: Any, *_args: Any) -> Any:
    evidence = getattr(self.scheduler.token_to_kv_pool_allocator, "evidence", None)
    if evidence is None:
        return None
    result.internal_state[NAME] = evidence.snapshot()
    return result


def after_scheduler_init(_result: Any, self: Any, *_args: Any, **_kwargs: Any) -> None:
    from kvir.sglang_ext.metrics import publish_metrics
    from kvir.sglang_ext.selfcheck import check_scheduler

    if _plan() is not None:
        check_scheduler(self)
        publish_metrics(self)


# ---- ranks -------------------------------------------------------------------------------------------------


def no_nccl_on_cpu(original: Callable[..., Any], self: Any, group: Any, device: Any, **kwargs: Any) -> Any:
    if _plan() is None or str(device) != "cpu":
        return original(self, group, device, **kwargs)
    self.available, self.disabled = False, True
    return None


# ---- compiled decode ---------------------------------------------------------------------------------------


def before_compiling(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    from kvir.sglang_ext import standin
    from kvir.sglang_ext.traceable import make_traceable

    if _plan() is None:
        return original(*args, **kwargs)
    make_traceable()
    return None if standin.in_use() else original(*args, **kwargs)


CONFIGURATOR = "mem_cache.kv_cache_configurator.KVCacheConfigurator."
INTERNAL_STATE = "managers.scheduler_components.internal_state.SchedulerInternalStateController."
HOOKS: tuple[Hook, ...] = (
    Hook(
        CONFIGURATOR + "config_from_budget",
        "around",
        size_pool,
        "the same bytes as stock, and more logical token ids than could be resident in full",
    ),
    Hook(CONFIGURATOR + "_build_token_to_kv_pool", "around", build_pool, "the head-page pool"),
    Hook(CONFIGURATOR + "_build_token_to_kv_pool_allocator", "around", build_allocator, "its allocator"),
    Hook(
        "managers.schedule_batch.ScheduleBatch.maybe_evict_swa",
        "after",
        prepare_allocation,
        "first statement of both allocation functions: requests open, windows slide",
    ),
    Hook(
        "managers.schedule_policy.PrefillAdder.add_one_req",
        "around",
        tell_budget,
        "the budget's question does not name the request: shared prefixes are credited here",
    ),
    Hook(
        "managers.schedule_batch.Req.__init__",
        "after",
        new_request,
        "the plan's fingerprint is part of the prefix-cache key; beam search is refused",
    ),
    Hook(
        "managers.schedule_batch.Req._compute_max_prefix_len",
        "around",
        cap_match,
        "the queries that a selection observes are computed, never taken from the cache",
    ),
    Hook(
        "model_executor.model_runner.ModelRunner.forward",
        "after",
        settle_triggers,
        "what a selection of decode chose on the device enters the books, graph or not",
    ),
    Hook(INTERNAL_STATE + "get_internal_state", "after", add_internal_state, "evidence in /server_info"),
    Hook(
        "distributed.device_communicators.pynccl.PyNcclCommunicator.__init__",
        "around",
        no_nccl_on_cpu,
        "ranks on a CPU have gloo; 0.5.23 asks for a CUDA device there",
    ),
    Hook(
        "model_executor.cpu_graph_runner.register_fake_ops",
        "around",
        before_compiling,
        "`--enable-torch-compile`: torch is told of CPU operators, which the stand-in does not have; "
        "records between layers become such as torch can trace, so a step is one graph",
    ),
    Hook(
        "managers.scheduler.Scheduler.__init__",
        "after",
        after_scheduler_init,
        "the self-check, once everything is built",
    ),
)
