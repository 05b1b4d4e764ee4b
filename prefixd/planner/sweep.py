"""Many plans of one trace beside each other, and which of them is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from prefixd.planner.curve import Curve, CurvePart, References, capacities, parts, put_together, references
from prefixd.planner.figures import PlanFigures
from prefixd.planner.virtual_daemon import Plan, Progress, simulate
from prefixd.planner.workload import achievable_rate, of_trace, trace_requests
from prefixd.workloads.mooncake import HASH_TOKENS

GIB = 1 << 30
MEMORY_PRICE = 30
"""What a byte of CPU memory costs, in bytes of disk: of two machines that find as much, the cheaper one is enough."""
ENOUGH = 0.95
"""Of the best hit rate of a sweep: what is enough."""


@dataclass(frozen=True)
class TracePlan:
    """A machine, and the trace that it is asked.

    Attributes:
        plan: the machine.
        trace: in Mooncake's format.
        limit: its first so many requests; None: all.
        speed: so many times as fast as recorded.
    """

    plan: Plan
    trace: Path
    limit: int | None = None
    speed: float = 1.0

    def run(self, progress: Progress | None = None) -> PlanFigures:
        """Its figures. Raises ConfigError."""
        found = trace_requests(self.trace, self.limit)
        workload = of_trace(self.trace.name, found, speed=self.speed)
        (figures,) = simulate(self.plan, [workload], achievable=achievable_rate(found), progress=progress)
        return figures

    @property
    def cpu_bytes(self) -> int:
        """Size of its CPU tier."""
        return self.plan.settings.cpu.bytes

    @property
    def disk_bytes(self) -> int:
        """Size of its disk tier."""
        return self.plan.settings.disk.bytes

    @property
    def price(self) -> float:
        """Of its tiers below the GPU, in GiB of disk."""
        return (MEMORY_PRICE * self.cpu_bytes + self.disk_bytes) / GIB

    def to_plain(self) -> dict[str, Any]:
        """What a sweep varies, as JSON types."""
        settings = self.plan.settings
        return {
            "cpu_bytes": self.cpu_bytes,
            "disk_bytes": self.disk_bytes,
            "policy": settings.scheduler.policy,
            "eviction": settings.cache.eviction,
        }


Point = tuple[TracePlan, PlanFigures]


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes; what has not begun when this is left by an error never does."""
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def sweep(plans: Sequence[TracePlan], jobs: int, progress: Callable[[], None]) -> list[Point]:
    """The figures of each plan, in the order of `plans`, computed by so many processes. Raises ConfigError."""
    with processes(jobs) as pool:
        running = [pool.submit(TracePlan.run, plan) for plan in plans]
        for done in as_completed(running):
            done.result()
            progress()
        return [(plan, future.result()) for plan, future in zip(plans, running, strict=True)]


def curve_of(trace: Path, limit: int | None, sizes: Sequence[int], policies: Sequence[str], jobs: int) -> Curve:
    """The miss-ratio curve of a trace at `sizes` blocks, or at some from small to large, computed by processes.

    Raises ConfigError.
    """
    known = references(trace_requests(trace, limit))
    chosen = sorted(set(sizes)) or capacities(known.blocks)
    work = parts(policies, chosen)
    with processes(jobs) as pool:
        running = [pool.submit(_curve_part, part, trace, limit) for part in work]
        results = [(part, future.result()) for part, future in zip(work, running, strict=True)]
    return put_together(known, chosen, HASH_TOKENS, results)


_known: tuple[Path, int | None, References] | None = None  # a process of a pool reads the trace once


def _curve_part(part: CurvePart, trace: Path, limit: int | None) -> list[int]:
    global _known
    if _known is None or _known[:2] != (trace, limit):
        _known = trace, limit, references(trace_requests(trace, limit))
    return part.run(_known[2])


def enough(points: Sequence[Point]) -> Point:
    """The cheapest plan that finds nearly as much as the best one: the knee of the curve."""
    best = max(figures.hit_rate for _, figures in points)
    good = [point for point in points if point[1].hit_rate >= ENOUGH * best]
    return min(good, key=lambda point: (point[0].price, -point[1].requests_per_s))
