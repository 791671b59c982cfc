"""What a plan says of decode graphs, in SGLang's own configuration; and kernels that were built before."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvir.lowering.stages import ExecutionPlan
from kvir.lowering.triggers import device_selections

if TYPE_CHECKING:
    import torch
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig

logger = logging.getLogger(__name__)


def graphs_of(
    config: CudaGraphConfig, plan: ExecutionPlan, *, own_list: bool, ranks: int = 1
) -> CudaGraphConfig:
    """Decode is captured for the plan's batch sizes, as far as SGLang has memory for, or for the user's own
    list; not at all if the host chooses rows in it, which a graph that is replayed would leave out.

    Prefill is not captured: a captured prompt is padded, and the residency follows true lengths.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    config = with_phase(config, Phase.PREFILL, backend=Backend.DISABLED)
    if (reason := host_selects(plan, ranks)) is not None:
        logger.info("kvir: decode is not captured in graphs: %s", reason)
        return with_phase(config, Phase.DECODE, backend=Backend.DISABLED)
    decode = config.decode
    most = decode.max_bs or 0
    sizes = [bucket.batch for bucket in plan.buckets.decode if bucket.batch <= most]
    if decode.backend == Backend.DISABLED or own_list or not sizes:
        return config
    return with_phase(config, Phase.DECODE, bs=sizes, max_bs=sizes[-1])


def host_selects(plan: ExecutionPlan, ranks: int) -> str | None:
    """Why selections of decode run on the host, layer by layer; None if they do not, or there are none."""
    selections = device_selections(plan.layout)
    if selections.why_not is None and selections.nuclei and ranks > 1:
        return "ranks exchange what stayed"
    return selections.why_not


def declare_graphs(args: Any, config: Any, plan: ExecutionPlan) -> None:
    """Hand the graphs over; a CPU has none."""
    from sglang.srt.arg_groups.overrides import declare_resolution
    from sglang.srt.model_executor.cuda_graph_config import Phase

    if not plan.buckets.decode or config.cuda_graph_config is None:
        return
    own_list = (Phase.DECODE, "bs") in getattr(args, "_cuda_graph_config_locked", ())
    graphs = graphs_of(config.cuda_graph_config, plan, own_list=own_list, ranks=config.tp_size)
    declare_resolution(args, "kvir", cuda_graph_config=graphs)


def install_kernels(device: torch.device) -> None:
    """Use what `kvir build-kernels` left beside the policy; else kernels are compiled when first launched."""
    from sglang.srt.runtime_context import get_memory

    from kvir.kernels.triton.build import default_folder, install
    from kvir.kernels.triton.ops import arch_of

    if device.type != "cuda":
        return
    target = arch_of(device)
    folder = default_folder(Path(get_memory().kv_ir), target)
    if not folder.is_dir():
        logger.info("kvir: no %s: Triton compiles kernels when they are first launched", folder)
    elif (reason := install(folder, target)) is not None:
        logger.warning("kvir: %s is not used: %s", folder, reason)
    else:
        logger.info("kvir: kernels from %s", folder)
        _install_modules(folder, target)


def _install_modules(folder: Path, target: str) -> None:
    """FlashInfer's, if the plan has some; where they are missing it compiles when it is first called."""
    from kvir.kernels.flashinfer.modules import FOLDER, install

    if not (folder / FOLDER).is_dir():
        return
    try:
        reason = install(folder, target)
    except Exception as error:  # a folder that is broken, or another FlashInfer: it compiles then
        reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        logger.warning("kvir: FlashInfer's modules beside the policy are not used: %s", reason)
