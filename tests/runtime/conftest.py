"""SGLang's modules are imported here as a CPU server imports them."""

from kvir.sglang_ext import standin

standin.install()
