"""`--kv-ir`, and the plan it becomes: read once in the launching process, handed to the others with the
arguments.
"""

from __future__ import annotations

import sys
from typing import Any, Optional

import msgspec
from sglang.srt.arg_groups.arg_utils import A, Arg
from sglang.srt.server_args import ServerArgs

from kvir.lowering.stages import ExecutionPlan
from kvir.sglang_ext.errors import KvirError

_PLAN = "_kvir_plan"  # bookkeeping that travels with the pickled record
_FROM_COMMAND_LINE = "_kvir_from_command_line"


class KvirServerArgs(ServerArgs):
    """SGLang's arguments and one more.  The value is readable as `get_memory().kv_ir` in every process."""

    _NS_PATH = "memory"
    kv_ir: A[
        Optional[str],  # noqa: UP045  SGLang evaluates this annotation itself
        Arg(help="KV-cache policy to execute: a kvir .ir file, or a plan lowered from one.", resolvable=True),
    ] = None

    @classmethod
    def from_cli_args(cls, args: Any) -> KvirServerArgs:
        record = super().from_cli_args(args)
        record._kvir_from_command_line = True
        return record

    def resolve_once(self) -> None:
        """From the command line a bad plan or an unsupported flag ends with one message and exit code 2; from
        `Engine(...)` it is a KvirError."""
        from kvir.sglang_ext import refusals

        try:
            if self.kv_ir is not None and not self.__dict__.get("_resolution_finished"):
                refusals.check_raw(self)
                # the model's own sliding windows are part of the plan: one pool for all layers
                self.disable_hybrid_swa_memory = True
            super().resolve_once()
        except KvirError as error:
            if not self.__dict__.get(_FROM_COMMAND_LINE):
                raise
            print(error, file=sys.stderr, flush=True)
            raise SystemExit(2) from None


def store_plan(server_args: ServerArgs, plan: ExecutionPlan) -> None:
    server_args.__dict__[_PLAN] = msgspec.json.encode(plan)


def stored_plan() -> ExecutionPlan | None:
    """The plan of this server, in any of its processes; None without `--kv-ir`."""
    from sglang.srt.runtime_context import get_server_args

    encoded = get_server_args().__dict__.get(_PLAN)
    return None if encoded is None else msgspec.json.decode(encoded, type=ExecutionPlan)
