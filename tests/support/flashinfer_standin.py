"""What kvir calls of FlashInfer, in plain torch, for machines without a GPU.

Arguments are bound to the signatures of the installed package, so that a call that it would not take fails
here too.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import flashinfer
import torch
from torch import Tensor

LN_2 = math.log(2)


class _Wrapper:
    real: Any
    plans = 0  # of all wrappers of a kind

    def __init__(self, workspace: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        inspect.signature(self.real).bind(workspace, kv_layout, backend=backend)
        assert workspace.dtype is torch.uint8
        assert kv_layout == "NHD"
        self.planned: dict[str, Any] | None = None

    def plan(self, *arguments: Any, **keywords: Any) -> None:
        bound = inspect.signature(self.real.plan).bind(self, *arguments, **keywords)
        bound.apply_defaults()
        self.planned = dict(bound.arguments)
        assert self.planned["q_data_type"] in (torch.float32, torch.float16, torch.bfloat16)
        type(self).plans += 1

    def _bind_run(self, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        assert self.planned is not None, "run before plan"
        bound = inspect.signature(self.real.run).bind(self, *arguments, **keywords)
        return {**self.planned, **bound.arguments}


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    real = flashinfer.BatchPrefillWithRaggedKVCacheWrapper

    def run(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Any:
        given = self._bind_run(q, k, v, **keywords)
        queries, rows = given["qo_indptr"].tolist(), given["kv_indptr"].tolist()
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
        for b in range(len(queries) - 1):
            mine, held = slice(queries[b], queries[b + 1]), slice(rows[b], rows[b + 1])
            out[mine], lse[mine] = attend(q[mine], k[held], v[held], given)
        return results(out, lse, given)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    real = flashinfer.BatchPrefillWithPagedKVCacheWrapper

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], **keywords: Any) -> Any:
        given = self._bind_run(q, cache, **keywords)
        k, v = cache  # [pages, P, heads, D]
        assert k.shape[1] == given["page_size"]
        assert k.shape[2] == given["num_kv_heads"]
        assert k.stride() == v.stride()
        assert q.is_contiguous()
        queries, pages = given["qo_indptr"].tolist(), given["paged_kv_indptr"].tolist()
        ends = given["paged_kv_last_page_len"].tolist()
        out, lse = torch.full_like(q, torch.nan), torch.full(q.shape[:2], torch.nan)
        for b in range(len(queries) - 1):
            mine, ids = slice(queries[b], queries[b + 1]), given["paged_kv_indices"][pages[b] : pages[b + 1]]
            count = (len(ids) - 1) * k.shape[1] + ends[b]
            keys, values = (x[ids.long()].flatten(0, 1)[:count] for x in (k, v))
            out[mine], lse[mine] = attend(q[mine], keys, values, given)
        return results(out, lse, given)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    assert v_a.shape == v_b.shape
    assert s_a.shape == s_b.shape == v_a.shape[:2]
    assert all(x.is_contiguous() for x in (v_a, s_a, v_b, s_b))
    lse = torch.logaddexp(s_a * LN_2, s_b * LN_2)
    a, b = (torch.exp(s * LN_2 - lse)[..., None] for s in (s_a, s_b))
    return (a * v_a.float() + b * v_b.float()).to(v_a.dtype), lse / LN_2


def attend(q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D], k and v [n, Hkv, D] -> out [T, Hq, D], lse [T, Hq] of base 2."""
    assert q.shape[1] == given["num_qo_heads"]
    assert k.shape[1] == given["num_kv_heads"]
    assert len(k), "FlashInfer was given a sequence without rows"
    assert given["window_left"] == -1
    group = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("thd,nhd->htn", q.float(), keys) * given["sm_scale"]
    if given["logits_soft_cap"]:
        logits = given["logits_soft_cap"] * torch.tanh(logits / given["logits_soft_cap"])
    if given["causal"]:
        seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        logits = logits.masked_fill(~seen, -torch.inf)
    out = torch.einsum("htn,nhd->thd", logits.softmax(-1), values)
    return out.to(q.dtype), logits.logsumexp(-1).T / LN_2


def results(out: Tensor, lse: Tensor, given: dict[str, Any]) -> Any:
    if given.get("out") is not None:
        out = given["out"].copy_(out)
    return (out, lse) if given.get("return_lse") else out
