"""Which ways of serving are compared with each other. Daemons of one group run side by side, repeats in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from prefixd.settings import CacheSettings, SchedulerSettings
from prefixd.workloads.text_analysis import BLOCK_BYTES, BLOCK_TOKENS, Serving, serving_of

SUITES = ("goals", "policies", "header", "tiers", "eviction", "latency")
TIER_SETS = (("gpu",), ("gpu", "cpu"), ("gpu", "cpu", "disk"))
POLICIES: tuple[str, ...] = get_args(SchedulerSettings.model_fields["policy"].annotation)
EVICTIONS: tuple[str, ...] = get_args(CacheSettings.model_fields["eviction"].annotation)

NO_CACHE, FPF = serving_of("no-cache"), serving_of("fpf")
FCFS_ALONE = Serving(name="fcfs, no prefetch", policy="fcfs", look_ahead=0)
EVERYTHING = Serving(name="everything on gpu", everything=True)
FCFS, RELAXED_FPF = serving_of("fcfs"), serving_of("relaxed-fpf")
_NEW = 0.5  # of the requests in the suite `header`
_SIDE_BY_SIDE = 5
_LONG_S = 0.25
"""A slow disk reads a prefix in less, or fewer requests are sent."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure: a way of serving, a prefix length, a disk.

    Attributes:
        serving: how.
        prefix_tokens: length of a prefix.
        one_by_one: each request when the one before it was answered.
        disk_bytes_per_s: of all reads and writes of the disk together; None: what the device has.
        header_tokens: that all prefixes begin with.
        new: share of the requests whose prefixes nobody else has.
    """

    serving: Serving
    prefix_tokens: int
    one_by_one: bool = False
    disk_bytes_per_s: int | None = None
    header_tokens: int = 0
    new: float = 0.0

    @property
    def name(self) -> str:
        slow = "" if self.disk_bytes_per_s is None else f", disk {self.disk_bytes_per_s / 1e6:g} MB/s"
        return self.serving.name + slow

    @property
    def takes_long(self) -> bool:
        """Whether each request takes so long that fewer have to do: its prefix is computed, or read slowly."""
        prefix_bytes = self.prefix_tokens // BLOCK_TOKENS * BLOCK_BYTES
        slow = self.disk_bytes_per_s is not None and prefix_bytes > _LONG_S * self.disk_bytes_per_s
        return slow or self.one_by_one or not self.serving.caching


def groups(suite: str, prefix_tokens: Sequence[int], slow_disk: int, header_tokens: int) -> list[list[Cell]]:
    """The cells of a suite, by group; `goals` for every prefix length, the others for the first. The suite `header` has
    a header of so many tokens."""
    first = prefix_tokens[0]
    if suite == "goals":
        return [
            [
                *(Cell(serving, length) for serving in (NO_CACHE, FCFS_ALONE, FPF, EVERYTHING)),
                Cell(FPF, length, disk_bytes_per_s=slow_disk),
                *([Cell(FCFS_ALONE, length, disk_bytes_per_s=slow_disk)] if length == first else []),
            ]
            for length in prefix_tokens
        ]
    if suite == "policies":
        return _in_groups([Cell(serving, first) for serving in (NO_CACHE, *map(serving_of, POLICIES))])
    if suite == "header":
        ways = (FCFS, FPF, RELAXED_FPF)
        return [[Cell(serving, first, header_tokens=header_tokens, new=_NEW) for serving in ways]]
    if suite == "eviction":
        return _in_groups([Cell(Serving(name=each, eviction=each), first) for each in EVICTIONS])
    if suite == "latency":
        servings = (NO_CACHE, *(Serving(name="+".join(tiers), tiers=tiers) for tiers in TIER_SETS))
        return _in_groups([Cell(serving, first, one_by_one=True) for serving in servings])
    return [[Cell(serving, first) for serving in _of_tiers(tiers)] for tiers in TIER_SETS]


def _of_tiers(tiers: tuple[str, ...]) -> list[Serving]:
    """The paper's ways: FPF with its prefetcher, and FCFS and FPF before it had one (V.G)."""
    name = "+".join(tiers)
    return [
        Serving(name=name, tiers=tiers),
        Serving(name=f"{name}, no prefetch", tiers=tiers, look_ahead=0),
        Serving(name=f"{name}, fcfs, no prefetch", tiers=tiers, look_ahead=0, policy="fcfs"),
    ]


def _in_groups(cells: list[Cell]) -> list[list[Cell]]:
    return [cells[start : start + _SIDE_BY_SIDE] for start in range(0, len(cells), _SIDE_BY_SIDE)]
