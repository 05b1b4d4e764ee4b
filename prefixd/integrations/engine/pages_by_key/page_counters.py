"""Counters of the calls that ask for, load and save pages by key."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from prefixd.client import Tier

COUNTERS = {
    "queries": "Calls that asked which pages are cached.",
    "query_pages": "Pages that they asked about.",
    "hit_pages": "Of these, pages from the first on that were cached, by the tier that they were in.",
    "hit_bytes": "Bytes of these pages, by tier.",
    "loads": "Calls that brought pages from prefixd into the engine's memory.",
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
BY_TIER = ("hit_pages", "hit_bytes")
"""Names of the counters that also count by tier."""


class PageCounters:
    """Values of `COUNTERS` since the start, counted from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = dict.fromkeys(COUNTERS, 0)

    def asked(self, pages: int, hits: Mapping[Tier, int], page_bytes: int) -> None:
        """Counts a call that asked for pages; `hits` are the cached ones, by tier."""
        self._add(queries=1, query_pages=pages)
        for tier, found in hits.items():
            self._add(tier, hit_pages=found, hit_bytes=found * page_bytes)

    def loaded(self, asked: int, pages: int, nbytes: int, elapsed_s: float, cut: bool) -> None:
        """Counts a load of `asked` pages that brought `pages`; `cut`: its time was over before the end."""
        self._add(
            loads=1,
            load_pages=pages,
            load_failed_pages=asked - pages,
            load_bytes=nbytes,
            load_seconds=elapsed_s,
            cut_calls=int(cut),
        )

    def saved(self, asked: int, pages: int, new: int, nbytes: int, elapsed_s: float, cut: bool) -> None:
        """Counts a save of `asked` pages: `pages` are kept now, `new` of them were not before."""
        self._add(
            saves=1,
            save_pages=new,
            duplicate_pages=pages - new,
            dropped_pages=asked - pages,
            save_bytes=nbytes,
            save_seconds=elapsed_s,
            cut_calls=int(cut),
        )

    def failed(self) -> None:
        """Counts a call that failed although prefixd was there."""
        self._add(errors=1)

    def values(self) -> dict[str, float]:
        """All counts by their names in `COUNTERS`, and counts by tier under names as "hit_pages_disk"."""
        with self._lock:
            return dict(self._values)

    def _add(self, tier: Tier | None = None, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                self._values[name] += count
                if tier is not None:
                    of_tier = f"{name}_{tier.name.lower()}"
                    self._values[of_tier] = self._values.get(of_tier, 0) + count
