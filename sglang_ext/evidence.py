"""What the policy did, for people and for tests: a policy that silently did nothing must be visible."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvir.sglang_ext.pool import KvirPool
    from kvir.sglang_ext.requests import RequestState

FINISHED_KEPT = 256

# Prometheus name -> (help text, key in `Evidence.gauges()`)
METRICS: dict[str, str] = {
    "kvir_pool_bytes": "bytes of the head-page pool",
    "kvir_covered_bytes": "bytes that running requests read",
    "kvir_idle_bytes": "bytes kept as prefix cache only",
    "kvir_free_bytes": "bytes free now",
    "kvir_full_kv_bytes": "bytes that full KV of the running requests would need",
    "kvir_peak_covered_bytes": "largest kvir_covered_bytes so far",
    "kvir_peak_full_kv_bytes": "largest kvir_full_kv_bytes so far",
    "kvir_rows_never_written": "rows that their unit's policy dropped before they were written",
    "kvir_pages_slid": "(page, class) cells that slid out of a window",
    "kvir_tombstoned": "cells reclaimed from the prefix cache",
    "kvir_healed": "cells of the prefix cache restored by a recomputation",
    "kvir_matches_shortened": "prefix matches cut to a prefix that is still whole",
    "kvir_admissions_deferred": "requests that waited for head-pages",
    "kvir_selections": "selections by score: prompts, and steps of decode",
    "kvir_rows_evicted": "rows that selections dropped, over all units",
    "kvir_decode_shortfalls": "decode steps that ran out of head-pages",
}


class Evidence:
    """Figures are sums over ranks; each keeps the books of all."""

    def __init__(self, pool: KvirPool) -> None:
        self._pool = pool
        self._finished: deque[dict[str, Any]] = deque(maxlen=FINISHED_KEPT)
        self.gauge_objects: dict[str, Any] = {}  # Prometheus gauges, with --enable-metrics

    def push_metrics(self) -> None:
        if self.gauge_objects:
            for name, value in self.gauges().items():
                self.gauge_objects[name].set(value)

    def note_end(self, state: RequestState | None) -> None:
        """A request's residency is about to end."""
        if state is None:
            return
        res, geo = self._pool.residency, self._pool.residency.geometry
        full = len(state.pages) * geo.unit_count
        held = int(res.covered_by(state).sum())
        self._finished.append(
            {
                "rid": state.rid,
                "prompt_tokens": state.prompt_tokens,
                "cached_tokens": state.cached_tokens,
                "pages": len(state.pages),
                "head_pages_held": held,
                "head_pages_full": full,
                "bytes_held": held * self._pool.head_page_bytes,
                "bytes_full": full * self._pool.head_page_bytes,
                "retractions": state.retractions,
                "compact_head_pages": 0 if state.compact is None else state.compact.head_pages,
            }
        )
        self.push_metrics()

    def gauges(self) -> dict[str, int]:
        res, size = self._pool.residency, self._pool.head_page_bytes
        units, count = res.geometry.unit_count, res.counters
        return {
            "kvir_pool_bytes": res.pool.size * res.pool.rank_count * size,
            "kvir_covered_bytes": int(res.covered_head_pages.sum()) * size,
            "kvir_idle_bytes": int(res.idle_head_pages.sum()) * size,
            "kvir_free_bytes": int((res.pool.free + res.pool.quarantined).sum()) * size,
            "kvir_full_kv_bytes": res.pages_in_use * units * size,
            "kvir_peak_covered_bytes": res.peak_covered * size,
            "kvir_peak_full_kv_bytes": res.peak_pages_in_use * units * size,
            "kvir_rows_never_written": count["rows_never_written"] * res.geometry.page_tokens,
            "kvir_pages_slid": count["slid_private"] + count["slid_tree"],
            "kvir_tombstoned": count["tombstoned"] + count["tombstoned_at_once"],
            "kvir_healed": count["healed"],
            "kvir_matches_shortened": count["matches_shortened"],
            "kvir_admissions_deferred": count["admissions_deferred"],
            "kvir_selections": count["selections"],
            "kvir_rows_evicted": count["rows_evicted"],
            "kvir_decode_shortfalls": count["decode_shortfalls"],
        }

    def snapshot(self) -> dict[str, Any]:
        """JSON-ready; shown under `kvir` in the server's internal state."""
        res, plan = self._pool.residency, self._pool.plan
        return {
            "plan": plan.policy.name,
            "fingerprint": plan.fingerprint,
            "kernels": self._pool.kernels_name,
            "sums": self._pool.sums_name,
            "copies": self._pool.copies_name,
            "flashinfer_layers": self._pool.flashinfer_layers,
            "selects_on_device": self._pool.selects_on_device,
            "units": res.geometry.unit_count,
            "kv_heads": res.geometry.kv_heads,
            "ranks": res.geometry.ranks.count,
            "head_page_bytes": self._pool.head_page_bytes,
            "physical_tokens": self._pool.physical_tokens,
            "logical_tokens": self._pool.size,
            "head_pages": {
                "pool": res.pool.size * res.pool.rank_count,
                "free": int(res.pool.free.sum()),
                "quarantined": int(res.pool.quarantined.sum()),
                "covered": int(res.covered_head_pages.sum()),
                "idle": int(res.idle_head_pages.sum()),
                "peak_resident": res.peak_resident,
                "peak_covered": res.peak_covered,
                "peak_full_kv": res.peak_pages_in_use * res.geometry.unit_count,
            },
            "peak_running": res.peak_requests,
            "running": [
                {
                    "rid": state.rid,
                    "pages": len(state.pages),
                    "head_pages_held": int(res.covered_by(state).sum()),
                    "by_unit": state.head_pages_by_unit(res.geometry).tolist(),
                    "selected": None if state.compact is None else state.compact.account(),
                    "cached_tokens": state.cached_tokens,
                }
                for state in res.requests.values()
            ],
            "finished": list(self._finished),
            "counters": {name: int(value) for name, value in sorted(res.counters.items())},
            "metrics": self.gauges(),
        }

    def pool_line(self) -> str:
        res = self._pool.residency
        return (
            f"{res.pool.free} free + {res.pool.quarantined} quarantined + {res.idle_head_pages} idle + "
            f"{res.covered_head_pages} covered of {res.pool.size} head-pages on each rank, "
            f"{len(res.requests)} requests"
        )
