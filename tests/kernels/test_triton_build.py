"""Kernels compiled for GPUs that are not here: registers suffice, and decode loads without waiting."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import triton

from kvir import cli
from kvir.kernels.triton import aot, build
from kvir.kernels.triton.build import AttentionFacts, BuiltKernel, Manifest
from support.models import CONFIGS

BF16 = torch.bfloat16
QWEN36 = AttentionFacts(4, 24, 256, 16, BF16)
GEMMA3 = AttentionFacts(4, 8, 256, 16, BF16, selects=True)
LLAMA = AttentionFacts(8, 32, 128, 16, BF16, selects=True)  # Qwen3-8B has the same heads
POLICY = "kvir: 1\nname: windows\nrules:\n  - keep: [{sink: 4}, {recent: 1024}]\n  - {layers: 1, keep: all}\n"


def assert_sound(manifest: Manifest, folder: Path) -> None:
    """No kernel spills, every file is what the manifest says, and decode copies 16 bytes at a time."""
    assert manifest.triton == triton.__version__
    for kernel in manifest.kernels:
        assert kernel.stack_bytes == 0, kernel
        assert kernel.blocks >= 1, kernel
        assert hashlib.sha256((folder / kernel.file).read_bytes()).hexdigest() == kernel.sha256
    decode = one(manifest, "decode_items")
    assert decode.async_loads >= 16
    assert decode.matrix_products > 0
    assert one(manifest, "extend_blocks").async_loads > 0


def one(manifest: Manifest, name: str) -> BuiltKernel:
    return next(kernel for kernel in manifest.kernels if kernel.kernel == name)


@pytest.mark.parametrize(
    ("facts", "target"), [(LLAMA, "sm_80"), (QWEN36, "sm_90"), (GEMMA3, "sm_100")], ids=["80", "90", "100"]
)
def test_kernels_of_models(facts: AttentionFacts, target: str, tmp_path: Path) -> None:
    manifest = build.build([facts], target, tmp_path)
    assert_sound(manifest, tmp_path)
    names = {kernel.kernel for kernel in manifest.kernels}
    assert {"append_rows", "merge_items", "_plan_lanes", "_plan_full_items"} <= names
    assert ({"column_sums", "gather_rows"} <= names) == facts.selects
    planned = 2 if target == "sm_80" else 3  # blocks per multiprocessor that the work list counts on
    assert one(manifest, "decode_items").blocks >= planned


def test_the_command_builds_what_a_server_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "policy.ir").write_text(POLICY)
    folder = tmp_path / "kernels"
    command = ["build-kernels", str(tmp_path / "policy.ir"), "--model", str(CONFIGS / "llama-3.1-8b")]
    assert cli.main([*command, "--target", "sm_90", "--no-flashinfer", "-o", str(folder)]) == 0
    assert "decode_items" in capsys.readouterr().out
    manifest = msgspec.json.decode((folder / build.MANIFEST).read_bytes(), type=Manifest)
    assert_sound(manifest, folder)

    # Installed, Triton finds each of them by itself, whatever the batch.
    knobs: Any = getattr(triton, "knobs")  # noqa: B009
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "installed"))
    assert build.install(folder, "sm_90") is None
    hits: list[bool] = []
    monkeypatch.setattr(
        knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit), raising=False
    )
    with aot.compiling(90):
        build.launch_everything(AttentionFacts(8, 32, 128, 16, BF16, batches=(1, 5, 256)))
    assert len(hits) >= 5
    assert all(hits)


def test_kernels_for_another_gpu_are_not_installed(tmp_path: Path) -> None:
    assert build.install(tmp_path, "sm_90") == f"{tmp_path / build.MANIFEST} does not exist"
    manifest = Manifest(build.FORMAT, "sm_80", triton.__version__, [])
    (tmp_path / build.MANIFEST).write_bytes(msgspec.json.encode(manifest))
    reason = build.install(tmp_path, "sm_90")
    assert reason is not None
    assert "is for sm_80" in reason
    assert f"not sm_90 and {triton.__version__}" in reason
