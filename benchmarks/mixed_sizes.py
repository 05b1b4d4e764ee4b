"""One tier shared by blocks of several sizes: what is evicted beyond need, and how full the tier stays.

Stores and reads prompts whose blocks have several sizes, in the CPU tier, in the disk tier, and in a disk tier
whose codec makes another number of bytes of each block (coded), through the real cache and its eviction. What is
stored is drawn from a mixture that drifts: each size's share goes up and down. What is read is drawn at random, so a
block's recency has nothing to do with its place. Every byte that is read is checked. Blocks on disk are sparse files,
on a file system in memory where that has room: the device is not what is measured.

worst_excess_pages is the bytes that one operation evicted beyond the bytes it asked for, in pages, in the worst
operation; it must be at most 1. utilisation is the share of the capacity that blocks have, the lowest after any
operation once the tier was full; it must be at least 0.95 (coded_utilisation, of the tier with a codec: 0.9).
wrong_bytes must be 0.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import harness
from benchmarks.common.options import chosen, option, seed, size
from benchmarks.storage.mixed_tier import Figures, Mixture, TierName, mixed_tier

WORST_EXCESS_PAGES = 1.0
LEAST_UTILISATION = 0.95
LEAST_CODED_UTILISATION = 0.9
"""The end of a page is lost for half a part, and pages of these small tiers have four to sixteen."""
_KIB, _MIB = 1 << 10, 1 << 20

MIXTURES = {
    "small": Mixture((4 * _KIB, 64 * _KIB), 16 * _MIB),
    "large": Mixture((96 * _KIB, 2 * _MIB), 600 * _MIB),
    "five": Mixture((4 * _KIB, 64 * _KIB, 96 * _KIB, 512 * _KIB, 2 * _MIB), 768 * _MIB),
}
"""Tiers of 100 to 256 pages each: pages are 64 KiB for the small sizes and 6 MiB for the others."""
TIERS: tuple[TierName, ...] = ("cpu", "disk", "coded")
_MEMORY = Path("/dev/shm")


async def run_one(tier: TierName, mixture: Mixture, operations: int, seed: int, folder: Path) -> Figures:
    """One tier under one mixture."""
    async with mixed_tier(tier, mixture, operations, seed, folder) as world:
        with harness.progress(f"{tier}: {mixture.name}", 500) as step:
            await world.run(step)
        return world.figures


def _folder(mixture: Mixture) -> Path | None:
    """Where the slab files and the index are made: in memory if there is room, in the default place if not."""
    try:
        free = shutil.disk_usage(_MEMORY).free
    except OSError:
        return None
    return _MEMORY if free >= 2 * mixture.capacity_bytes else None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every mixture in every tier."""
    runs = []
    for name in options.mixtures:
        for tier in options.tiers:
            mixture = MIXTURES[name]
            if options.capacity is not None:
                mixture = Mixture(mixture.sizes, options.capacity)
            with tempfile.TemporaryDirectory(prefix="prefixd-mixed-", dir=_folder(mixture)) as folder:
                figures = asyncio.run(run_one(tier, mixture, options.operations, options.seed, Path(folder)))
            runs.append({"mixture": name, **asdict(figures)})
    return {
        "worst_excess_pages": max(run["worst_excess_pages"] for run in runs),
        "utilisation": min((run["utilisation"] for run in runs if run["tier"] != "coded"), default=1.0),
        "coded_utilisation": min((run["utilisation"] for run in runs if run["tier"] == "coded"), default=1.0),
        "wrong_bytes": sum(run["wrong_bytes"] for run in runs),
        "runs": runs,
    }


def violations(result: dict[str, Any]) -> list[str]:
    """What a result breaks of what must hold, in words."""
    most = {"worst_excess_pages": WORST_EXCESS_PAGES}
    least = {"utilisation": LEAST_UTILISATION, "coded_utilisation": LEAST_CODED_UTILISATION}
    return harness.missed(result, zero=["wrong_bytes"], most=most, least=least)


@harness.benchmark(
    "mixed_sizes",
    __doc__,
    option("--operations", 100_000, "of each run"),
    chosen("--mixtures", MIXTURES, "which sizes"),
    chosen("--tiers", TIERS, "which tiers"),
    option("--capacity", None, "of the tier, such as 64MiB (by mixture)", size),
    seed("of everything that is drawn"),
)
def main(options: harness.Options) -> harness.Outcome:
    """What was measured, and what must hold of it."""
    result = measure(options)
    table = harness.Table(result["runs"], ("tier", "sizes", "worst_excess_pages", "utilisation", "wrong_bytes"))
    return harness.Outcome(result, violations(result), [table])


if __name__ == "__main__":
    harness.run(main)
