"""`sglang.launch_server` in which the hook on $LOST_HOOK never takes effect.

Not guarded by `__name__`: the processes that SGLang spawns import this module too, and lose the hook as well.
"""

from __future__ import annotations

import os
import runpy
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry

registered = HookRegistry.register


def forgetful(target: str, *args: Any, **kwargs: Any) -> None:
    if not target.endswith(os.environ["LOST_HOOK"]):
        registered(target, *args, **kwargs)


HookRegistry.register = forgetful  # pyright: ignore[reportAttributeAccessIssue]

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
