"""Where the benchmark runs, and how time is taken there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from prefixd_swap.vmem import VirtualMemory, create_memory
from prefixd_swap.vmem.backends.cuda_driver import STAND_IN_NAME, open_device

Kind = Literal["cuda", "stand-in", "cpu"]
CHUNK_BYTES = 2 << 20
_SMALL_MEMORY_BYTES = 512 << 20
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or what stands in for one so that the benchmark itself can be tested.

    kind: "cuda" measures. "stand-in" calls a driver that is not one, and torch computes on the CPU; "cpu" has memory of
    the host. Both are tiny and their times say nothing.
    """

    kind: Kind
    ordinal: int = 0

    @property
    def measures(self) -> bool:
        return self.kind == "cuda"

    @property
    def memory_name(self) -> str:
        return "cpu" if self.kind == "cpu" else f"cuda:{self.ordinal}"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda", self.ordinal) if self.measures else torch.device("cpu")

    @property
    def name(self) -> str:
        if self.kind == "cpu":
            return "host memory"
        return torch.cuda.get_device_name(self.ordinal) if self.measures else STAND_IN_NAME

    def memory(self, chunk_bytes: int = CHUNK_BYTES) -> VirtualMemory:
        """A fresh memory, in chunks of 2 MiB by default. Raises DeviceError."""
        return create_memory(self.memory_name, chunk_bytes)

    def free_bytes(self) -> int:
        """What the device has left; others may use it too. torch's own cache is given back before."""
        if self.kind == "cpu":
            return _SMALL_MEMORY_BYTES
        if self.measures:
            torch.cuda.empty_cache()
        device = open_device(self.ordinal)
        device.use_context()
        return int(device.call("cuMemGetInfo")[0])

    def synchronize(self) -> None:
        if self.measures:
            torch.cuda.synchronize(self.ordinal)

    def wall_us(
        self, work: Callable[[], object], rounds: int, after: Callable[[], object] = lambda: None, warm_up: int = 1
    ) -> float:
        """Median microseconds on the host's clock until the device has finished `work`; `after` is not counted."""
        times = []
        for number in range(warm_up + rounds):
            self.synchronize()
            begin = time.perf_counter()
            work()
            self.synchronize()
            if number >= warm_up:
                times.append(time.perf_counter() - begin)
            after()
        return round(statistics.median(times) * 1e6, 2)

    def stream_us(self, work: Callable[[], object], rounds: int) -> float:
        """Median microseconds between two events of the current stream, one before and one behind `work`.

        So the time in which the stream waits for the host to launch something counts too.
        """
        if not self.measures:
            return self.wall_us(work, rounds)
        for _ in range(_WARM_UP):
            work()
        times = []
        for _ in range(rounds):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) * 1e3)
        median: float = statistics.median(times)
        return round(median, 2)
