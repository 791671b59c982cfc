"""What each kernel implementation can do, as data: no torch, no kernel is imported.  Lowering chooses from
this table.

A capability check answers a reason or None, and never tries anything out.
"""

from __future__ import annotations

from dataclasses import dataclass

OPS = ("append", "attend_decode", "attend_extend")


@dataclass(frozen=True)
class Implementation:
    """One implementation of one op.

    devices: device types it runs on.  dtypes: of q, k, v and the pool.  features: attention features beyond a
    causal softmax with sinks and a window.  head_dims: multiples up to a
    largest, None for any.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[str, ...]
    features: tuple[str, ...] = ()
    head_dim_multiple: int = 1
    max_head_dim: int | None = None

    def refusal(self, device: str, dtype: str, head_dim: int, needs: tuple[str, ...]) -> str | None:
        """Why this implementation cannot run, or None if it can."""
        if device not in self.devices:
            return f"runs on {' and '.join(self.devices)} only, not on {device}"
        if dtype not in self.dtypes:
            return f"has no {dtype} (has {', '.join(self.dtypes)})"
        if head_dim % self.head_dim_multiple:
            return f"needs a head size that is a multiple of {self.head_dim_multiple}, not {head_dim}"
        if self.max_head_dim is not None and head_dim > self.max_head_dim:
            return f"takes head sizes up to {self.max_head_dim}, not {head_dim}"
        missing = [n for n in needs if n not in self.features]
        if missing:
            return f"lacks {', '.join(missing)}"
        return None


_ALL_DTYPES = ("float32", "bfloat16", "float16")
_CPU = Implementation("cpu", ("cpu",), _ALL_DTYPES)
_CPU_ATTEND = Implementation("cpu", ("cpu",), _ALL_DTYPES, features=("logit_cap",))
_REF = Implementation("ref", ("cpu",), _ALL_DTYPES)
_REF_ATTEND = Implementation("ref", ("cpu",), _ALL_DTYPES, features=("logit_cap",))

# Per op, best first.
CATALOG: dict[str, tuple[Implementation, ...]] = {
    "append": (_CPU, _REF),
    "attend_decode": (_CPU_ATTEND, _REF_ATTEND),
    "attend_extend": (_CPU_ATTEND, _REF_ATTEND),
}
