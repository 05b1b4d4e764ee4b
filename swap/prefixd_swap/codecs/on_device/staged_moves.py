"""Moves through a buffer on a device, of two halves: one is filled while the other is emptied.

pack:     kernels   | fill half 0  | fill half 1  |              | fill half 0  |        unpack: the other
          copies                   | empty half 0 | empty half 1 |              | ...    way round
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from prefixd_swap.threads import started_threads, wait_all

_ALIGNED = 256

Stage = Callable[[int, int, torch.Tensor], None]
"""Its arguments: the first part, the number of parts, and their objects in staging, uint8 ``[parts, bytes]``."""


class StagedMoves:
    """One direction: a thread, two streams and a staging buffer.

    Args:
        device: of the buffer.
        half_bytes: of each half of it.
        name: the thread's.
    """

    def __init__(self, device: torch.device, half_bytes: int, name: str) -> None:
        half_bytes = -(-half_bytes // _ALIGNED) * _ALIGNED
        self._staging = torch.empty((2, half_bytes), dtype=torch.uint8, device=device)
        on_gpu = device.type == "cuda"
        self._kernels = torch.cuda.Stream(device) if on_gpu else None
        self._copies = torch.cuda.Stream(device) if on_gpu else None
        self._pool = started_threads(1, f"prefixd-{name}")
        if on_gpu:
            torch.cuda.synchronize(device)  # staging may be memory that kernels of another stream still use

    def kernels(self) -> AbstractContextManager[object]:
        """Tensors that are made within it are for kernels; they wait for no stream of the engine's."""
        return _within(self._kernels)

    async def run(self, work: Callable[[], None]) -> None:
        """Runs `work` in the thread; returns or raises when it has ended, also when cancelled meanwhile."""
        await wait_all([self._pool.submit(work)])

    def move(self, parts: int, nbytes: int, first: Stage, second: Stage, *, kernels_first: bool) -> None:
        """Runs two stages for each half of parts, of `nbytes` each in staging; returns or raises when both have ended.

        The first stage fills a half once the second one has emptied it; both submit work to a stream of their own.
        """
        filling, emptying = (self._kernels, self._copies) if kernels_first else (self._copies, self._kernels)
        emptied: list[Any] = [None, None]
        step = self._staging.shape[1] // nbytes
        try:
            for number, at in enumerate(range(0, parts, step)):
                half, count = number % 2, min(step, parts - at)
                staged = self._staging[half, : count * nbytes].view(count, nbytes)
                if filling is not None and emptied[half] is not None:
                    filling.wait_event(emptied[half])
                with _within(filling):
                    first(at, count, staged)
                if filling is not None and emptying is not None:
                    emptying.wait_stream(filling)
                with _within(emptying):
                    second(at, count, staged)
                if emptying is not None:
                    emptied[half] = emptying.record_event()
        finally:
            for each in (self._kernels, self._copies):
                if each is not None:
                    each.synchronize()

    def close(self) -> None:
        """Waits for the thread's work and ends it. Can be called twice."""
        self._pool.shutdown()


def _within(stream: Any) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
