"""The entry point that SGLang calls in each of its processes (group `sglang.srt.plugins`)."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from kvir.sglang_ext.errors import KvirError

SGLANG_VERSION = "0.5.23"


def register() -> None:
    """Register everything; nothing changes until a server is started with `--kv-ir`.

    SGLang logs and swallows an exception from here; then `--kv-ir` is an unknown argument, and the server
    does not start.
    """
    found = version("sglang")
    if found != SGLANG_VERSION:
        raise KvirError(f"kvir works with sglang {SGLANG_VERSION}; {found} is installed")
    from kvir.sglang_ext import standin

    standin.install()
    _register_flag()
    _register_hooks()
    _register_resolution()
    _register_factories()


def _register_flag() -> None:
    import sglang.srt.entrypoints.engine as engine
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvir.sglang_ext.server_args import KvirServerArgs

    HookRegistry.register("sglang.srt.server_args.ServerArgs", KvirServerArgs, HookType.REPLACE)
    # a class attribute, which the registry's propagation does not reach
    setattr(engine.Engine, "server_args_class", KvirServerArgs)  # noqa: B010  declared as an instance's


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from kvir.sglang_ext.hooks import HOOKS, SRT

    kinds = {"around": HookType.AROUND, "after": HookType.AFTER}
    for hook in HOOKS:
        HookRegistry.register(SRT + hook.target, hook.function, kinds[hook.kind])


def _register_resolution() -> None:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    from kvir.sglang_ext import refusals
    from kvir.sglang_ext.graphs import declare_graphs
    from kvir.sglang_ext.planning import plan_of

    ATTENTION_BACKEND_CHOICES.append(refusals.BACKEND)

    @register_resolution_hook("handle_attention_backend_compatibility")
    def _(args: Any, previous: Any) -> None:
        if resolving_view(args).kv_ir is not None:
            # before `previous`: the default page size is chosen later and keeps this one
            declare_resolution(
                args, refusals.BACKEND, attention_backend=refusals.BACKEND, page_size=refusals.PAGE_TOKENS
            )
        previous(args)

    @register_resolution_hook("handle_cache_compatibility")
    def _(args: Any, previous: Any) -> None:
        if resolving_view(args).kv_ir is not None:
            declare_resolution(args, refusals.BACKEND, radix_cache_backend=refusals.BACKEND)
        previous(args)

    @register_resolution_hook("handle_other_validations")
    def _(args: Any, previous: Any) -> None:
        previous(args)
        config = resolving_view(args)
        if config.kv_ir is not None:
            refusals.check_resolved(config)
            plan = plan_of(args, config)
            refusals.check_ranks(plan, config.tp_size)
            declare_graphs(args, config, plan)


def _register_factories() -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import create_unified_radix_cache, register_radix_cache_backend

    from kvir.sglang_ext.refusals import BACKEND

    @register_attention_backend(BACKEND)
    def _(runner: Any) -> Any:
        from kvir.kernels import dispatch
        from kvir.sglang_ext.backend import kernels_of
        from kvir.sglang_ext.cpu_backend import KvirCpuBackend
        from kvir.sglang_ext.graphs import install_kernels
        from kvir.sglang_ext.selfcheck import check_kernels

        wanted = kernels_of(runner.token_to_kv_pool.plan)
        if wanted != "triton" or dispatch.unavailable(wanted) is not None:
            backend = KvirCpuBackend(runner)
        else:
            from kvir.sglang_ext.triton_backend import KvirTritonBackend

            install_kernels(runner.token_to_kv_pool.kv.device)
            backend = KvirTritonBackend(runner)
        check_kernels(backend.pool, backend.kernels.name)
        return backend

    def tree(context: Any) -> Any:
        from kvir.sglang_ext.prefix import KvirRadixCache

        return create_unified_radix_cache(context, cache_class=KvirRadixCache)

    register_radix_cache_backend(BACKEND, tree)
