"""`sglang.launch_server` with CPU kernels that append values as keys, as a miscompiled kernel might.

Not guarded by `__name__`: the processes that SGLang spawns import this module too.
"""

from __future__ import annotations

import runpy
from dataclasses import replace
from typing import Any

from kvir.kernels.cpu import ops

right = ops.KERNELS


def wrong(k: Any, v: Any, *rest: Any) -> None:
    right.append(v, k, *rest)


ops.KERNELS = replace(right, append=wrong)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
