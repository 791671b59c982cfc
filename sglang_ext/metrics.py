"""`kvir_*` gauges in SGLang's /metrics (with --enable-metrics)."""

from __future__ import annotations

from typing import Any

from kvir.sglang_ext.evidence import METRICS


def publish_metrics(scheduler: Any) -> None:
    """Create the gauges.

    SGLang collects over process boundaries through prometheus_client's multiprocess files, which hold values,
    not functions; so the evidence sets them: when a request ends, and when the server turns idle.
    """
    from sglang.srt.runtime_context import get_observability

    if not get_observability().enable_metrics:
        return
    # prometheus_client chooses its storage when it is imported: only now is the directory known
    from prometheus_client import Gauge

    evidence = scheduler.token_to_kv_pool_allocator.evidence
    evidence.gauge_objects = {
        name: Gauge(name, text, multiprocess_mode="mostrecent") for name, text in METRICS.items()
    }
    evidence.push_metrics()
