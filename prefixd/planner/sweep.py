"""Simulates many plans of one trace side by side, and chooses the cheapest one that is enough."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

from prefixd.planner.curve import (
    SAMPLED_REFERENCES,
    Curve,
    CurvePart,
    References,
    capacities,
    parts,
    put_together,
    references,
)
from prefixd.planner.plan_figures import PlanFigures
from prefixd.planner.virtual_daemon import Plan, Progress, simulate
from prefixd.planner.workload import achievable_rate, of_trace, trace_requests
from prefixd.workloads.mooncake import HASH_TOKENS, read_trace

GIB = 1 << 30
MEMORY_PRICE = 30
"""The price of a byte of CPU memory in bytes of disk: of two machines that find as much, the cheaper one is enough."""
ENOUGH = 0.95
"""The share of a sweep's best hit rate that is enough."""
_NICE = 10


@dataclass(frozen=True)
class TracePlan:
    """A machine and the trace of its requests.

    Attributes:
        plan: the machine.
        trace: a file in Mooncake's format.
        limit: how many requests of the trace to use, from the first on; None: all.
        speed: factor of the recorded rate of requests.
    """

    plan: Plan
    trace: Path
    limit: int | None = None
    speed: float = 1.0

    def run(self, progress: Progress | None = None) -> PlanFigures:
        """Simulates the plan. Raises ConfigError."""
        found = trace_requests(self.trace, self.limit)
        workload = of_trace(self.trace.name, found, speed=self.speed)
        (figures,) = simulate(self.plan, [workload], achievable=partial(achievable_rate, found), progress=progress)
        return figures

    @property
    def cpu_bytes(self) -> int:
        """Size of the CPU tier."""
        return self.plan.settings.cpu.bytes

    @property
    def disk_bytes(self) -> int:
        """Size of the disk tier."""
        return self.plan.settings.disk.bytes

    @property
    def price(self) -> float:
        """Price of the tiers below the GPU, in GiB of disk."""
        return (MEMORY_PRICE * self.cpu_bytes + self.disk_bytes) / GIB

    def to_plain(self) -> dict[str, Any]:
        """The values that a sweep varies, as JSON types."""
        settings = self.plan.settings
        return {
            "cpu_bytes": self.cpu_bytes,
            "disk_bytes": self.disk_bytes,
            "policy": settings.scheduler.policy,
            "eviction": settings.cache.eviction,
            "codec": self.plan.codec.name,
        }


Point = tuple[TracePlan, PlanFigures]


@contextmanager
def processes(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of `jobs` processes at a lower priority. An error or Ctrl-C inside the context ends them at once."""
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_begin)
    try:
        yield pool
    except BaseException:
        for process in active_children():
            process.terminate()
        # Waits for the pool's thread, which ends with them: at exit the interpreter writes to a pipe that it closes.
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


def _begin() -> None:
    """Prepares a process of the pool; it ends with its parent, even if the parent is killed."""
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def sweep(plans: Sequence[TracePlan], pool: ProcessPoolExecutor, progress: Callable[[], None]) -> list[Point]:
    """The figures of each plan, in the order of `plans`, computed by `processes`. Raises ConfigError."""
    running = [pool.submit(TracePlan.run, plan) for plan in plans]
    for done in as_completed(running):
        done.result()
        progress()
    return [(plan, future.result()) for plan, future in zip(plans, running, strict=True)]


def curve_of(
    trace: Path,
    limit: int | None,
    policies: Sequence[str],
    pool: ProcessPoolExecutor,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    at_once: Callable[[], int] | None = None,
    references_at_most: int = SAMPLED_REFERENCES,
) -> Curve:
    """The miss-ratio curve of a trace, or of its first `limit` requests, at capacities from small to large.

    Args:
        trace: in Mooncake's format.
        limit: how many requests of the trace to use, from the first on; None: all.
        policies: beside the optimum.
        pool: `processes` that compute it.
        progress: called with the number of computations done and of all.
        at_once: returns how many processes to use; called whenever one is free. All by default.
        references_at_most: a trace with more block references is sampled.

    Raises:
        ConfigError: the trace cannot be read.
    """
    asked = pool.submit(_asked, trace, limit).result()
    source = _Source(trace, limit, min(1.0, references_at_most / max(1, asked)))
    known = pool.submit(_references, source).result()
    sizes = capacities(known.all_blocks)
    work = parts(policies, sizes)
    waiting, running = deque(work), dict[Future[list[int]], CurvePart]()
    results: list[tuple[CurvePart, list[int]]] = []
    while waiting or running:
        while waiting and (at_once is None or len(running) < max(1, at_once())):
            part = waiting.popleft()
            running[pool.submit(_curve_part, part, source)] = part
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            results.append((running.pop(future), future.result()))
            progress(len(results), len(work))
    return put_together(known, sizes, HASH_TOKENS, results)


def _asked(trace: Path, limit: int | None) -> int:
    """Counts the block references of a trace's requests."""
    return sum(len(request.hash_ids) for request in read_trace(trace, limit))


class _Source(NamedTuple):
    """The trace that each process of the pool reads once."""

    trace: Path
    limit: int | None
    share: float


_known: tuple[_Source, References] | None = None


def _references(source: _Source) -> References:
    global _known
    if _known is None or _known[0] != source:
        _known = source, references(read_trace(source.trace, source.limit), source.share)
    return _known[1]


def _curve_part(part: CurvePart, source: _Source) -> list[int]:
    return part.run(_references(source))


def enough(points: Sequence[Point]) -> Point:
    """The cheapest plan that finds nearly as much as the best one: the knee of the curve."""
    best = max(figures.hit_rate for _, figures in points)
    good = [point for point in points if point[1].hit_rate >= ENOUGH * best]
    return min(good, key=lambda point: (point[0].price, -point[1].requests_per_s))


def soonest(points: Sequence[Point], chosen: Point) -> Point:
    """The plan with the sizes of `chosen` and the smallest median time to first token; `chosen` if none is faster."""
    plan, _ = chosen
    alike = [
        point for point in points if (point[0].cpu_bytes, point[0].disk_bytes) == (plan.cpu_bytes, plan.disk_bytes)
    ]
    return min([chosen, *alike], key=lambda point: point[1].ttft_s.p50)
