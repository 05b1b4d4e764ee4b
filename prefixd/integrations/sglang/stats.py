"""Hands the backend's counters to SGLang: samples for its own histograms (`get_stats`), and Prometheus counters that
its port serves beside its own."""

from __future__ import annotations

from functools import cache
from typing import Any

from prefixd.client import Tier
from prefixd.integrations.engine.pages_by_key.page_counters import BY_TIER, COUNTERS, PageCounters

_SAMPLES = 4096  # kept between two calls of `get_stats`
_LABELS = ("model_name", "tp_rank", "pp_rank", "dp_rank")


class HiCacheCounters(PageCounters):
    """Counts since the start, and samples for SGLang's histograms since the last call for them. For any thread.

    Args:
        config: SGLang's `HiCacheStorageConfig`, which switches its metrics on.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._samples: dict[str, list[float]] = {}
        self._clear()
        self._prometheus = _prometheus() if config.enable_storage_metrics else {}
        self._labels = {name: str(getattr(config, name, 0)) for name in _LABELS}

    def loaded(self, asked: int, pages: int, nbytes: int, elapsed_s: float, cut: bool) -> None:
        super().loaded(asked, pages, nbytes, elapsed_s, cut)
        self._sample("prefetch", pages, nbytes, elapsed_s)

    def saved(self, asked: int, pages: int, new: int, nbytes: int, elapsed_s: float, cut: bool) -> None:
        super().saved(asked, pages, new, nbytes, elapsed_s, cut)
        self._sample("backup", new, nbytes, elapsed_s)

    def storage_metrics(self) -> Any:
        """SGLang's `StorageMetrics` since the last call (pages a transfer, GB/s), with all counts since the start in
        the attribute `prefixd`."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            metrics = StorageMetrics(**self._samples)
            self._clear()
            metrics.prefixd = dict(self._values)
        return metrics

    def _add(self, tier: Tier | None = None, **counts: float) -> None:
        super()._add(tier, **counts)
        of_tier = {} if tier is None else {"tier": tier.name.lower()}
        for name, count in counts.items():
            if count and name in self._prometheus:
                self._prometheus[name].labels(**self._labels, **of_tier).inc(count)

    def _sample(self, way: str, pages: int, nbytes: int, elapsed_s: float) -> None:
        if not pages or elapsed_s <= 0:
            return
        with self._lock:
            for name, value in ((f"{way}_pgs", float(pages)), (f"{way}_bandwidth", nbytes / elapsed_s / 1e9)):
                if len(self._samples[name]) < _SAMPLES:
                    self._samples[name].append(value)

    def _clear(self) -> None:
        self._samples = {f"{way}_{what}": [] for way in ("prefetch", "backup") for what in ("pgs", "bandwidth")}


@cache  # a process can register a name once, so a backend that is attached again goes on with these counters
def _prometheus() -> dict[str, Any]:
    """Counters `sglang:prefixd_<name>`. The import is here since SGLang first sets the folder for all its processes."""
    from prometheus_client import Counter

    return {
        name: Counter(f"sglang:prefixd_{name}", text, [*_LABELS, *(("tier",) if name in BY_TIER else ())])
        for name, text in COUNTERS.items()
    }
