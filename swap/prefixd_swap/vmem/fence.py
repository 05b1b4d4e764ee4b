"""Work that waits until the GPU no longer uses an address range.

CUDA's map and unmap are not ordered with streams: unmapping under a running kernel faults, and remapping under it
corrupts data silently. So every unmapping waits for an event of each stream that used the range.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from prefixd_swap.errors import MemoryMisuseError, SwapError
from prefixd_swap.vmem.backends.cuda_driver import CudaDevice

Work = Callable[[], None]


class Fence(ABC):
    """Runs work once everything that was submitted to some streams has ended. Not thread-safe: one thread owns it."""

    @abstractmethod
    def retire(self, streams: Iterable[int], work: Work) -> None:
        """Run `work` in `poll` after everything that `streams` hold now; at once if there is nothing to wait for.

        `streams` are stream handles, such as `torch.cuda.current_stream().cuda_stream`; 0 is the default stream.
        """

    @abstractmethod
    def poll(self, wait: bool = False) -> int:
        """Run the work that is due, or with `wait` all of it; returns the number of pieces of work left."""

    @abstractmethod
    def close(self) -> None:
        """Wait for all work and run it, then give the events back. Can be called twice.

        The memory that made the fence closes it at the latest.
        """


class HostFence(Fence):
    """Runs all work at once: on host memory a call has ended when it returns."""

    def retire(self, streams: Iterable[int], work: Work) -> None:
        work()

    def poll(self, wait: bool = False) -> int:
        return 0

    def close(self) -> None:
        pass


class CudaFence(Fence):
    """Records an event on every stream; events are reused."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._waiting: list[tuple[list[Any], Work]] = []
        self._idle: list[Any] = []
        self._closed = False

    def retire(self, streams: Iterable[int], work: Work) -> None:
        """Record an event on each of `streams`; without any stream run `work` at once."""
        if self._closed:
            raise MemoryMisuseError("this fence is closed; make another with VirtualMemory.fence()")
        self._device.use_context()
        events: list[Any] = []
        try:
            for stream in streams:
                events.append(self._idle.pop() if self._idle else self._device.create_event())
                self._device.call("cuEventRecord", events[-1], stream)
        except SwapError:
            self._idle.extend(events)
            raise
        if events:
            self._waiting.append((events, work))
        else:
            work()

    def poll(self, wait: bool = False) -> int:
        """Run the work whose events have all completed. After an error of the driver or of a piece of work, the work
        behind it stays waiting."""
        if not self._waiting:
            return 0
        self._device.use_context()
        left: list[tuple[list[Any], Work]] = []
        due: list[tuple[list[Any], Work]] = []
        for events, work in self._waiting:
            if wait:
                for event in events:
                    self._device.call("cuEventSynchronize", event)
            done = wait or all(self._device.event_done(event) for event in events)
            (due if done else left).append((events, work))
        self._waiting = left
        try:
            while due:
                events, work = due.pop(0)
                self._idle.extend(events)
                work()
        finally:
            self._waiting[:0] = due
        return len(self._waiting)

    def close(self) -> None:
        """Wait for all work and run it, then destroy the events."""
        if self._closed:
            return
        while self._waiting:  # work may retire more
            self.poll(wait=True)
        self._closed = True
        while self._idle:
            self._device.destroy_event(self._idle.pop())
