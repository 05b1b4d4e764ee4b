"""What the backend counts, and how it is told: SGLang's own histograms, and counters of ours."""

from __future__ import annotations

import threading
from typing import Any

COUNTERS = {
    "queries": "Calls that asked which pages are cached.",
    "query_pages": "Pages that they asked about.",
    "hit_pages": "Of these, pages from the first on that were cached.",
    "loads": "Calls that brought pages from prefixd into SGLang's host pools.",
    "load_pages": "Pages brought in.",
    "load_failed_pages": "Pages that were asked for and did not come.",
    "load_bytes": "Bytes brought in.",
    "load_seconds": "Seconds that loads took.",
    "saves": "Calls that gave pages to prefixd.",
    "save_pages": "Pages given to prefixd that it did not have.",
    "duplicate_pages": "Pages that prefixd had already when they were offered.",
    "dropped_pages": "Pages that were not saved: prefixd was away, slow or full.",
    "save_bytes": "Bytes given to prefixd that it did not have.",
    "save_seconds": "Seconds that saves took.",
    "cut_calls": "Calls that ended with some of their pages because their time was over.",
    "errors": "Calls that failed otherwise than because prefixd was away.",
}

_SAMPLES = 4096  # between two looks of SGLang's


class HiCacheCounters:
    """Counts since the start, and what SGLang's histograms get since they were last asked for. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._samples: dict[str, list[float]] = {}
        self._clear()

    def asked(self, pages: int, hits: int) -> None:
        """A call asked for pages."""
        self._add(queries=1, query_pages=pages, hit_pages=hits)

    def loaded(self, asked: int, pages: int, nbytes: int, elapsed_s: float, cut: bool) -> None:
        """A load has ended."""
        self._add(
            loads=1,
            load_pages=pages,
            load_failed_pages=asked - pages,
            load_bytes=nbytes,
            load_seconds=elapsed_s,
            cut_calls=int(cut),
        )
        self._sample("prefetch", pages, nbytes, elapsed_s)

    def saved(self, asked: int, pages: int, new: int, nbytes: int, elapsed_s: float, cut: bool) -> None:
        """A save has ended."""
        self._add(
            saves=1,
            save_pages=new,
            duplicate_pages=pages - new,
            dropped_pages=asked - pages,
            save_bytes=nbytes,
            save_seconds=elapsed_s,
            cut_calls=int(cut),
        )
        self._sample("backup", new, nbytes, elapsed_s)

    def failed(self) -> None:
        """A call failed otherwise than because prefixd was away."""
        self._add(errors=1)

    def values(self) -> dict[str, float]:
        """All counts since the start, by their names in `COUNTERS`."""
        with self._lock:
            return dict(self._values)

    def storage_metrics(self) -> Any:
        """SGLang's `StorageMetrics` since the last call: pages a transfer, GB/s; and `prefixd`, all counts since the
        start."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            metrics = StorageMetrics(**self._samples)
            self._clear()
            metrics.prefixd = dict(self._values)
        return metrics

    def _add(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                self._values[name] += count

    def _sample(self, way: str, pages: int, nbytes: int, elapsed_s: float) -> None:
        if not pages or elapsed_s <= 0:
            return
        with self._lock:
            for name, value in ((f"{way}_pgs", float(pages)), (f"{way}_bandwidth", nbytes / elapsed_s / 1e9)):
                if len(self._samples[name]) < _SAMPLES:
                    self._samples[name].append(value)

    def _clear(self) -> None:
        self._samples = {f"{way}_{what}": [] for way in ("prefetch", "backup") for what in ("pgs", "bandwidth")}
