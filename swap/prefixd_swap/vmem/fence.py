"""Work that must wait until the GPU is done with an address range.

CUDA's map and unmap are not ordered with streams: unmapping under a running kernel faults, and remapping
under it corrupts without a word. So every unmapping waits behind an event of each stream that used the range.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from prefixd_swap.vmem.cuda_driver import CudaDevice

Work = Callable[[], None]


class Fence(ABC):
    """Runs work once everything that was submitted to some streams has ended. Not thread-safe: one thread
    owns it."""

    @abstractmethod
    def retire(self, streams: Iterable[int], work: Work) -> None:
        """Run `work` in `poll` after all that `streams` hold now; at once if there is nothing to wait for.

        `streams` are stream handles, such as `torch.cuda.current_stream().cuda_stream`; 0 is the default
        stream.
        """

    @abstractmethod
    def poll(self, wait: bool = False) -> int:
        """Run the work that is due, or with `wait` all of it; returns how many pieces of work are left."""


class HostFence(Fence):
    """Host memory: a call that has returned has ended, so there is never anything to wait for."""

    def retire(self, streams: Iterable[int], work: Work) -> None:
        """Run `work` at once."""
        work()

    def poll(self, wait: bool = False) -> int:
        """Nothing is ever left."""
        return 0


class CudaFence(Fence):
    """Records an event on every stream; events are reused. Unverified on a GPU."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._waiting: list[tuple[list[Any], Work]] = []
        self._idle: list[Any] = []

    def retire(self, streams: Iterable[int], work: Work) -> None:
        """Record an event on each of `streams`; without any stream run `work` at once."""
        self._device.use_context()
        events: list[Any] = []
        for stream in streams:
            event = self._idle.pop() if self._idle else self._device.create_event()
            events.append(event)
            self._device.call("cuEventRecord", event, stream)
        if events:
            self._waiting.append((events, work))
        else:
            work()

    def poll(self, wait: bool = False) -> int:
        """Run the work whose events have all happened. An error of the driver leaves that work waiting."""
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
        for events, work in due:
            self._idle.extend(events)
            work()
        return len(self._waiting)
