"""`--kv-ir FILE` -> the plan that every process of this server executes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvir.lowering.device_facts import card_named
from kvir.lowering.stages import Dtype, ExecutionPlan
from kvir.sglang_ext.errors import KvirError
from kvir.sglang_ext.server_args import store_plan

# as torch and as --kv-cache-dtype spell them
_DTYPES: dict[str, Dtype] = {
    "torch.float32": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}


def plan_of(args: Any, config: Any) -> ExecutionPlan:
    """Lower (or load) the plan for the model and dtype that SGLang resolved, and store it on the arguments.

    Raises KvirError with the rendered diagnostics; what this version does not execute is among them
    (`lowering.unsupported`).
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of

    from kvir.lowering.load import plan_for_server
    from kvir.policy_ir.diagnostic import PolicyError

    kv_dtype = str(config.kv_cache_dtype)
    dtype = _DTYPES[str(model_config_of(args).dtype) if kv_dtype == "auto" else kv_dtype]
    folder = _folder(str(config.model_path))
    try:
        plan = plan_for_server(str(config.kv_ir), folder, dtype=dtype, device=_card(str(config.device)))
    except PolicyError as error:
        raise KvirError(str(error)) from None
    store_plan(args, plan)
    return plan


def _card(device: str) -> str:
    """The planner's name of the device that is here."""
    if device != "cuda":
        return device
    import torch

    return card_named(torch.cuda.get_device_name())


def _folder(model_path: str) -> Path:
    if Path(model_path).is_dir():
        return Path(model_path)
    from transformers.utils.hub import cached_file

    config = cached_file(model_path, "config.json")
    if config is None:
        raise KvirError(f"error: --kv-ir needs the config.json of {model_path}, and there is none")
    return Path(config).parent
