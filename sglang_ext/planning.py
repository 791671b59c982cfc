"""`--kv-ir FILE` -> the plan that every process of this server executes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvir.sglang_ext.errors import KvirError
from kvir.sglang_ext.server_args import store_plan


def plan_of(args: Any, config: Any) -> None:
    """Lower (or load) the plan for the model and dtype that SGLang resolved, and store it on the arguments.

    Raises KvirError with the rendered diagnostics.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of

    from kvir.lowering.load import plan_for_server
    from kvir.policy_ir.diagnostic import PolicyError

    model = model_config_of(args)
    dtype = str(model.dtype).removeprefix("torch.")
    if config.kv_cache_dtype not in ("auto", None):
        dtype = {"bf16": "bfloat16"}.get(config.kv_cache_dtype, config.kv_cache_dtype)
    try:
        plan = plan_for_server(
            config.kv_ir, _folder(str(config.model_path)), dtype=dtype, device=str(config.device)
        )
    except PolicyError as error:
        raise KvirError(str(error)) from None
    _runnable(plan)
    store_plan(args, plan)


def _folder(model_path: str) -> Path:
    if Path(model_path).is_dir():
        return Path(model_path)
    from transformers.utils import cached_file

    return Path(cached_file(model_path, "config.json")).parent


def _runnable(plan: Any) -> None:
    if plan.budgeted.prefill != plan.budgeted.decode:
        raise KvirError(
            "error: the runtime does not execute rules that differ between prefill and decode yet\n"
            "  help: drop `phase:` from the rules"
        )
