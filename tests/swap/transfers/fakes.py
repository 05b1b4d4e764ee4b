"""Time and threads that a test moves by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from prefixd_swap.transfers import DeviceLimits, Transfers


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeThreads(Executor):
    """Jobs that run when a test says so; `begun` has those under way, by what they were made of."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.begun: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.closed = False

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert not self.closed
        assert len(self.begun) < self.count, "a piece would wait in the pool"
        future: Future[Any] = Future()
        self.begun.append((work, future))
        return future

    def end(self, position: int) -> None:
        """Runs a job to its end."""
        work, future = self.begun.pop(position)
        future.set_result(work())

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        assert not self.begun, "a thread still runs"
        self.closed = True


class Bench:
    """Transfers over one fake device with a read and a write path."""

    def __init__(self, limits: DeviceLimits, *, write_in_flight: int | None = None, **options: Any) -> None:
        self.clock = FakeClock()
        self.pools: list[FakeThreads] = []
        self.transfers = Transfers(clock=self.clock, threads=self._make, **options)
        self.transfers.add_device("disk", limits)
        self.transfers.add_path("read", "disk")
        self.transfers.add_path("write", "disk", write_in_flight)

    def _make(self, count: int, name: str) -> FakeThreads:
        self.pools.append(FakeThreads(count))
        return self.pools[-1]

    @property
    def begun(self) -> int:
        """Pieces under way."""
        return len(self.pools[0].begun)

    async def end(self, position: int = 0, after_s: float = 0.0) -> None:
        """Ends the piece under way at `position` (0: started first), `after_s` seconds from now."""
        self.clock.now_s += after_s
        self.pools[0].end(position)
        await settle()

    async def end_all(self, after_s: float = 0.0) -> None:
        """Ends pieces, the oldest first, until none is under way."""
        while self.begun:
            await self.end(0, after_s)


async def settle() -> None:
    """Lets everything happen that can."""
    for _ in range(6):
        await asyncio.sleep(0)
