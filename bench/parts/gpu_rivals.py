"""The decode kernels of others on the same ragged rows, where they are installed: a KV head of a request is
shown to them as a request with one KV head.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

SPLITS = 8  # SGLang's own limit


def sglang_decode(
    q: Tensor, kv: Tensor, indptr: Tensor, slots: Tensor, scale: float
) -> tuple[Callable[[], object], Tensor]:
    """SGLang's Triton kernel: a launch, and where its answer is.

    q [R, G, D]; kv [N, 2, P, D]; indptr int32 [R + 1] and slots int64: rows (head-page * P + offset) of each
    of R lanes.  Raises ImportError without SGLang.
    """
    module = import_module("sglang.kernels.ops.attention.decode_attention")
    lanes, group, dim = q.shape
    keys, values = (kv[:, i].reshape(-1, 1, dim).contiguous() for i in (0, 1))
    out = torch.empty_like(q)
    logits = torch.empty((lanes, group, SPLITS, dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((lanes, group, SPLITS), dtype=torch.float32, device=q.device)
    splits = torch.full((lanes,), SPLITS, dtype=torch.int32, device=q.device)

    def launch() -> None:
        module.decode_attention_fwd(
            q, keys, values, out, indptr, slots, logits, lse, splits, SPLITS, scale, 1.0, 1.0
        )

    return launch, out


def flashinfer_decode(
    q: Tensor, kv: Tensor, page_indptr: Tensor, pages: Tensor, last_page_rows: Tensor, scale: float
) -> tuple[Callable[[], object], Tensor]:
    """FlashInfer's CUDA-core kernel, planned once: a launch, and where its answer is.

    page_indptr int32 [R + 1], pages int32: head-pages of each lane; last_page_rows int32 [R].  Raises
    ImportError without FlashInfer.
    """
    flashinfer = import_module("flashinfer")
    _, group, dim = q.shape
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        page_indptr.cpu(), pages, last_page_rows.cpu(), group, 1, dim, kv.shape[2],
        q_data_type=q.dtype, kv_data_type=kv.dtype, sm_scale=scale,
    )  # fmt: skip
    paged = kv[:, :, :, None]  # [N, 2, P, 1, D]
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, paged, out=out), out
