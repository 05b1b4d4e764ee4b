"""The ways of serving that a benchmark compares in one run, each in a daemon of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common.options import chosen, number, option
from prefixd.settings import Settings
from prefixd.workloads.text_analysis import BLOCK_BYTES, BLOCK_TOKENS
from prefixd_scheduler import POLICIES

TIERS = ("gpu", "gpu+cpu", "gpu+cpu+disk")
NO_CACHE = "no-cache"
COMPARED = ("fcfs", "relaxed-fpf", "shortest-ready")
"""Policies that are compared where none are named: the simplest, the default, the one that prices loads."""


@dataclass(frozen=True, slots=True)
class Way:
    """A policy of the queue and the tiers below it; no tiers: the cache is off."""

    name: str
    policy: str
    tiers: str

    @property
    def complete(self) -> bool:
        """Whether the tiers hold everything that the run caches."""
        return self.tiers == TIERS[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a run needs, in tokens, and which shares of it the tiers get.

    longest, usual: prompt and output of the longest request, and of most. all_tokens: everything that the run caches.
    running: requests computed at once; the GPU has room for the longest and usual ones beside it. gpu_share: of
    all_tokens, beside that. cpu_share: of all_tokens. The disk has room for everything.
    """

    longest: int
    usual: int
    all_tokens: int
    running: int
    gpu_share: float
    cpu_share: float

    def settings(self, way: Way, waiting: int) -> dict[str, Any]:
        """The settings, by dotted name, of a daemon that serves in this way; `waiting` requests may wait."""
        blocks = -(-self.all_tokens // BLOCK_TOKENS)
        tokens = self.longest + (self.running - 1) * self.usual
        running = -(-tokens // BLOCK_TOKENS) + 2 * self.running
        cpu = max(1, int(blocks * self.cpu_share)) if "cpu" in way.tiers else 0
        disk = blocks + blocks // 4 + 64 if "disk" in way.tiers else 0
        return {
            "worker.embedded": True,
            "worker.block_tokens": BLOCK_TOKENS,
            "worker.max_running": self.running,
            "scheduler.queue_limit": max(4096, waiting),
            "scheduler.policy": way.policy,
            "cache.enabled": bool(way.tiers),
            "gpu.bytes": (running + int(blocks * self.gpu_share)) * BLOCK_BYTES,
            "cpu.bytes": cpu * BLOCK_BYTES,
            "disk.bytes": disk * BLOCK_BYTES,
        }


WAYS = (
    chosen("--policies", POLICIES, "policies of the queue, each with the last of --tiers", COMPARED),
    chosen("--tiers", TIERS, "all but the last with the daemon's default policy, or else the first of --policies"),
)
"""The options that choose what is compared; `chosen_ways` reads them."""
SHARES = (
    option("--gpu-share", 0.0, "of everything cached that fits into the GPU tier beside what runs", number(0.0, 1e3)),
    option(
        "--cpu-share", 0.3, "of everything cached that fits into the CPU tier; the disk holds all", number(0.0, 1e3)
    ),
)
"""The options of `Room`."""


def chosen_ways(options: argparse.Namespace) -> list[Way]:
    """No cache; the default policy with each of the smaller tiers; every policy with the largest of them."""
    default = Settings().scheduler.policy
    usual = default if default in options.policies else options.policies[0]
    *smaller, largest = sorted(set(options.tiers), key=TIERS.index)
    return [
        Way(NO_CACHE, "fcfs", ""),
        *(Way(f"{usual} {tiers}", usual, tiers) for tiers in smaller),
        *(Way(f"{policy} {largest}", policy, largest) for policy in _distinct(options.policies)),
    ]


def _distinct(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(names))
