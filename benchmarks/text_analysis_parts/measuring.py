"""Runs the cells of a group: their daemons side by side, each warm, then their repeats in turn.

With a cache the requests are sent once more, before the first repeat: tiers had 10 to 15% fewer requests a second in
the first of three. The daemon still writes then what the warm-up has computed, and learns what loads take; that this is
why was not measured.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.stand_ins.throttled import DiskRate, ThrottledDaemon
from benchmarks.text_analysis_parts.suites import Cell
from prefixd.cli.demo.daemon_process import DaemonFailed, DaemonProcess
from prefixd.cli.demo.runner import Progress, measure, send_requests, settings_for
from prefixd.client import ClientError
from prefixd.workloads.latency_figures import Figures
from prefixd.workloads.text_analysis import TextAnalysis, TierSizes

_FEWER = 4  # so many times fewer requests where each takes long
_LEAST = 32


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell's figures: of each repeat, and the one in the middle by requests a second."""

    suite: str
    cell: Cell
    repeats: tuple[Figures, ...]

    @property
    def figures(self) -> Figures:
        """Of the repeat in the middle; the lower one of an even number."""
        ordered = sorted(self.repeats, key=lambda figures: figures.requests_per_s)
        return ordered[(len(ordered) - 1) // 2]

    def to_plain(self) -> dict[str, Any]:
        return {
            "suite": self.suite,
            "prefix_tokens": self.cell.prefix_tokens,
            "one_by_one": self.cell.one_by_one,
            "disk_bytes_per_s": self.cell.disk_bytes_per_s,
            "header_tokens": self.cell.header_tokens,
            "new": self.cell.new,
            "serving": asdict(self.cell.serving),
            **self.figures.to_plain(),
            "name": self.cell.name,
            "requests_per_s_of_repeats": [figures.requests_per_s for figures in self.repeats],
            "ttft_p50_s_of_repeats": [figures.ttft_s.p50 for figures in self.repeats],
            "output_digest_of_repeats": [figures.output_digest for figures in self.repeats],
        }


def ratio(one: Measured, other: Measured) -> float:
    """How many times as many requests a second: the median over repeats that ran one after the other."""
    return statistics.median(
        mine.requests_per_s / its.requests_per_s for mine, its in zip(one.repeats, other.repeats, strict=True)
    )


def sooner(one: Measured, other: Measured) -> float:
    """How many times as soon the first token is there, at the median: that of repeats that ran one after the other."""
    return statistics.median(
        its.ttft_s.p50 / mine.ttft_s.p50 for mine, its in zip(one.repeats, other.repeats, strict=True)
    )


def worker_threads() -> int:
    """Of this machine's cores: the worker stands for a GPU, of whose time the daemon and its copies take none."""
    return max(1, len(os.sched_getaffinity(0)) - 1)


def measure_group(
    suite: str, cells: Sequence[Cell], workload: TextAnalysis, sizes: TierSizes, threads: int, progress: Progress
) -> list[Measured]:
    """The figures of each cell, with so many threads for each worker. Raises DaemonFailed."""
    with ExitStack() as stack:
        daemons: list[tuple[Cell, TextAnalysis, DaemonProcess]] = []
        for cell in cells:
            of_cell = _workload(cell, workload)
            progress.begin(f"{cell.name}: starting a daemon", 0)
            # A short path: a unix socket's name has at most 107 bytes.
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prefixd-")))
            daemon = stack.enter_context(_daemon(cell, of_cell, sizes, threads, directory))
            daemons.append((cell, of_cell, daemon))
        warm_ups = _warm_up(daemons, threads, progress)
        started = [(*each, warm_up_s) for each, warm_up_s in zip(daemons, warm_ups, strict=True)]
        repeats: list[list[Figures]] = [[] for _ in started]
        for repeat in (workload.repeats, *range(workload.repeats)):  # the first is thrown away
            for found, (cell, of_cell, daemon, warm_up_s) in zip(repeats, started, strict=True):
                if repeat < workload.repeats or cell.serving.caching:
                    found.append(
                        measure(
                            cell.name,
                            daemon,
                            of_cell,
                            repeat=repeat,
                            one_by_one=cell.one_by_one,
                            warm_up_s=warm_up_s,
                            progress=progress,
                        )
                    )
        return [
            Measured(suite, cell, tuple(found[-workload.repeats :])) for cell, found in zip(cells, repeats, strict=True)
        ]


def _warm_up(
    daemons: Sequence[tuple[Cell, TextAnalysis, DaemonProcess]], threads: int, progress: Progress
) -> list[float | None]:
    """Asks each daemon that caches for each prefix once, as many daemons at a time as there are cores for; seconds."""
    caching = [(daemon, workload) for cell, workload, daemon in daemons if cell.serving.caching]
    at_once = max(1, len(os.sched_getaffinity(0)) // threads)
    took_s = iter(warm_up_all(caching, at_once, progress=progress) if caching else ())
    return [next(took_s) if cell.serving.caching else None for cell, *_ in daemons]


def warm_up_all(
    daemons: Sequence[tuple[DaemonProcess, TextAnalysis]], at_once: int, *, progress: Progress
) -> list[float]:
    """As `ask_each_once` of several daemons, so many `at_once`; the seconds of each.

    Raises DaemonFailed: a request failed.
    """
    places = asyncio.Semaphore(at_once)

    async def warm_up(daemon: DaemonProcess, workload: TextAnalysis) -> float:
        async with places:
            prompts, outstanding = workload.warm_up_prompts(), workload.outstanding
            try:
                return (await send_requests(daemon.address, workload, prompts, outstanding, progress.advance))[1]
            except ClientError as error:
                raise DaemonFailed(f"the daemon failed: {error}{daemon.last_words()}") from error

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(warm_up(*each) for each in daemons))

    progress.begin(f"{len(daemons)} daemons, each prefix once", sum(workload.prefixes for _, workload in daemons))
    return asyncio.run(all_of_them())


def _workload(cell: Cell, workload: TextAnalysis) -> TextAnalysis:
    """The cell's requests: fewer where each takes long, of longer prefixes fewer yet. All begin alike."""
    requests = workload.requests
    if cell.takes_long:
        shorter = requests * workload.prefix_tokens // max(workload.prefix_tokens, cell.prefix_tokens)
        requests = min(shorter, max(_LEAST, shorter // _FEWER))
    return replace(
        workload,
        prefix_tokens=cell.prefix_tokens,
        requests=max(1, requests),
        header_tokens=cell.header_tokens,
        new=cell.new,
    )


def _daemon(cell: Cell, workload: TextAnalysis, sizes: TierSizes, threads: int, directory: Path) -> DaemonProcess:
    if not cell.serving.caching:
        sizes = replace(sizes, cpu_prefixes=1, disk_prefixes=1)  # nothing is in them
    sent = replace(workload, repeats=workload.repeats + 1)  # with what is thrown away
    settings = settings_for(cell.serving, sent, sizes) | {"worker.threads": threads}
    if cell.disk_bytes_per_s is None:
        return DaemonProcess(settings, directory=directory)
    daemon = ThrottledDaemon(settings, directory=directory)
    daemon.throttle(DiskRate(cell.disk_bytes_per_s))
    return daemon
