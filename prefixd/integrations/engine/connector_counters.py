"""Counters of a connector's loads and saves, which an engine's metrics report."""

from __future__ import annotations

import threading

COUNTERS = {
    "loads": "Prefixes brought from prefixd into the engine's KV cache.",
    "load_failures": "Loads of which blocks did not come; they were computed again.",
    "load_failed_blocks": "Blocks that did not come.",
    "load_bytes": "Bytes brought in.",
    "load_seconds": "Seconds that loads took, from asking for the lease to giving it back.",
    "load_wait_seconds": "Seconds from when the engine first asked for what there is to load until it was there.",
    "load_regret_seconds": "Of these, what computing would have saved, by an estimate made afterwards.",
    "abandoned_leases": "Leases that were given up because they took too long; what was in memory by then was loaded.",
    "claim_waits": "Requests that waited while another engine computed their prefix.",
    "claim_wait_seconds": "Seconds of these waits.",
    "spared_tokens": "Prompt tokens that came into prefixd meanwhile, and were not computed here.",
    "saved_blocks": "Blocks given to prefixd.",
    "saved_bytes": "Bytes given to prefixd that it did not have.",
    "duplicate_blocks": "Blocks that prefixd had already when they were offered.",
    "dropped_blocks": "Blocks that were not saved: prefixd was away, slow or full, or their prefix had gone.",
    "refused_blocks": "Blocks that codec_on_device would alter too much, or with numbers that are not finite.",
    "unsure_media": "Requests that were not saved from their media on, whose content could not be told for sure.",
}


class ConnectorCounters:
    """Values of `COUNTERS` since the last `take`, counted from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def loaded(self, nbytes: int, elapsed_s: float, failed_blocks: int) -> None:
        """Counts a load that ended."""
        self._add(
            loads=1,
            load_failures=int(failed_blocks > 0),
            load_failed_blocks=failed_blocks,
            load_bytes=nbytes,
            load_seconds=elapsed_s,
        )

    def judged(self, waited_s: float, lost_s: float) -> None:
        """Counts a request's wait for its load, and the part of it that computing would have saved."""
        self._add(load_wait_seconds=waited_s, load_regret_seconds=lost_s)

    def abandoned(self, leases: int) -> None:
        """Counts leases that were given up."""
        self._add(abandoned_leases=leases)

    def waited_for_others(self, waited_s: float, spared_tokens: int) -> None:
        """Counts a request's wait for another engine's claim, and the tokens that were cached in that time."""
        self._add(claim_waits=1, claim_wait_seconds=waited_s, spared_tokens=spared_tokens)

    def saved(self, nbytes: int) -> None:
        """Counts the bytes of a save that were not cached before."""
        self._add(saved_bytes=nbytes)

    def saved_blocks(self, blocks: int, duplicates: int, dropped: int) -> None:
        """Counts the blocks of a save that a longer prefix needs."""
        self._add(saved_blocks=blocks, duplicate_blocks=duplicates, dropped_blocks=dropped)

    def refused(self, blocks: int) -> None:
        """Counts blocks that cannot be saved as int8."""
        self._add(refused_blocks=blocks)

    def unsure_media(self) -> None:
        """Counts an ended request that was not saved from its media on."""
        self._add(unsure_media=1)

    def take(self) -> dict[str, float]:
        """Returns the counts that are not 0, and starts again from 0."""
        with self._lock:
            values, self._values = self._values, {}
        return values

    def _add(self, **counts: float) -> None:
        with self._lock:
            for name, count in counts.items():
                if count:
                    self._values[name] = self._values.get(name, 0) + count
