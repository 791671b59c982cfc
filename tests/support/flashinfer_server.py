"""`sglang.launch_server` on a CPU with a stand-in for FlashInfer (`support.flashinfer_standin`)."""

from __future__ import annotations

import runpy

from kvir.sglang_ext import standin

standin.install()

from kvir.kernels.flashinfer import prefill  # noqa: E402  after SGLang's stand-in, as all that imports torch
from support import flashinfer_standin  # noqa: E402

prefill.library = lambda: flashinfer_standin

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
