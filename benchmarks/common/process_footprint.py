"""The memory, descriptors and mappings of a process, from /proc, and their change over time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_MIB = 1 << 20
_GPU_TIER = "/memfd:prefixd-gpu-tier"


@dataclass(frozen=True, slots=True)
class Footprint:
    """One look at one process; memory in MiB.

    `rss` is all memory that it has touched: `anon` is its own (heap, stacks), `shmem` the tiers in shared memory,
    `file` its programs and mapped files.

    `mappings` are those besides the GPU tier's, of which `gpu_tier_mapped` tells the length: the kernel makes one
    mapping of two where chunks that follow one another in the tier are mapped side by side, so their number is chance.
    """

    at_s: float
    rss: float
    anon: float
    shmem: float
    file: float
    descriptors: int
    mappings: int
    gpu_tier_mapped: float


def status_bytes(pid: int | str) -> dict[str, int]:
    """The memory figures of a process, such as VmRSS, from its status; "self" is this one. Raises OSError."""
    lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    words = [line.split() for line in lines if line.endswith(" kB")]
    return {name.rstrip(":"): int(value) << 10 for name, value, _ in words}


def footprint(pid: int, at_s: float) -> Footprint:
    """Returns the footprint of process `pid`. Raises OSError if the process has ended."""
    proc = Path("/proc") / str(pid)
    memory = status_bytes(pid)
    rss, anon, shmem, file = (memory[name] / _MIB for name in ("VmRSS", "RssAnon", "RssShmem", "RssFile"))
    lines = (proc / "maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines if _GPU_TIER in line]
    mapped = sum(int(end, 16) - int(begin, 16) for begin, end in spans) / _MIB
    descriptors = len(os.listdir(proc / "fd"))
    return Footprint(at_s, rss, anon, shmem, file, descriptors, len(lines) - len(spans), mapped)


def slope_per_minute(at_s: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes between all pairs of samples (Theil-Sen); 0 for fewer than two.

    Outliers and steps back and forth do not move it, as long as they are less than three samples in ten.
    """
    times, levels = np.asarray(at_s, float) / 60, np.asarray(values, float)
    first, second = np.triu_indices(len(times), 1)
    apart = times[second] > times[first]
    if not apart.any():
        return 0.0
    first, second = first[apart], second[apart]
    return float(np.median((levels[second] - levels[first]) / (times[second] - times[first])))
