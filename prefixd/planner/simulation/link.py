"""How long bytes take on their way. Time is passed in: on a `SimulatedTimeLoop` a run takes none, and gives the same
figures every time."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from prefixd_swap import CopyEngine
from prefixd_swap.copies.address_columns import Pair
from prefixd_swap.copies.row_columns import RowColumns
from prefixd_swap.errors import MemoryMisuseError

Sleep = Callable[[float], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class SimulatedCoding:
    """What is done to bytes at an end of a link, in threads, while the link moves others.

    Attributes:
        stored: bytes that move for each exact byte: 0.52.
        bytes_per_s: exact bytes that all threads together encode or decode in a second.
    """

    stored: float = 1.0
    bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not (0 < self.stored <= 1 and self.bytes_per_s > 0):
            raise MemoryMisuseError(
                f"a codec that stores {self.stored} of the bytes, {self.bytes_per_s} bytes/s, is not possible; give a "
                "share above 0 and at most 1, and a speed above 0"
            )


NOT_CODED = SimulatedCoding()


class SimulatedLink:
    """One way for bytes. Movements at the same time share the bandwidth; each one waits for the latency.

    Args:
        bytes_per_s: bandwidth.
        latency_s: from the end of a movement's bytes to its arrival.
        clock: seconds.
        sleep: waits for a number of seconds of that clock.
        coding: of the bytes at one of its ends.

    Attributes:
        moved_bytes: so far; of what is encoded, the stored bytes.
    """

    def __init__(
        self,
        bytes_per_s: float,
        latency_s: float,
        clock: Callable[[], float],
        sleep: Sleep,
        coding: SimulatedCoding = NOT_CODED,
    ) -> None:
        if not (bytes_per_s > 0 and latency_s >= 0):
            raise MemoryMisuseError(
                f"a link of {bytes_per_s} bytes/s and {latency_s} s is not possible; give a bandwidth above 0 and a "
                "latency of at least 0"
            )
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self.moved_bytes = 0
        self._clock = clock
        self._sleep = sleep
        self._coding = coding
        self._free_at_s = 0.0
        self._coded_at_s = 0.0

    async def move(self, nbytes: int) -> None:
        """Returns when `nbytes` exact bytes would have arrived."""
        now_s, moved = self._clock(), round(nbytes * self._coding.stored)
        self._free_at_s = max(now_s, self._free_at_s) + moved / self.bytes_per_s
        self._coded_at_s = max(now_s, self._coded_at_s) + nbytes / self._coding.bytes_per_s
        self.moved_bytes += moved
        await self._sleep(max(self._free_at_s, self._coded_at_s) + self.latency_s - now_s)


class UnbackedCopyEngine(CopyEngine):
    """Lets the time of copies pass: to a device over one link, and from it, or beside it, over another.

    Args:
        to_device: the way of what goes to a device.
        from_device: the way of everything else.
    """

    def __init__(self, to_device: SimulatedLink, from_device: SimulatedLink) -> None:
        self._to_device = to_device
        self._from_device = from_device
        self._closed = False

    async def copy(self, pairs: Sequence[Pair]) -> None:
        """Returns when the bytes would have arrived."""
        if self._closed:
            raise MemoryMisuseError("this copy engine is closed; create another")
        up = down = 0
        for destination, source in pairs:
            if destination.nbytes != source.nbytes:
                raise MemoryMisuseError(
                    f"cannot copy {source.nbytes} bytes over {destination.nbytes} bytes; sizes must match"
                )
            if destination.on_device:
                up += source.nbytes
            else:
                down += source.nbytes
        if up:
            await self._to_device.move(up)
        if down:
            await self._from_device.move(down)

    async def copy_rows(self, copies: Sequence[RowColumns]) -> None:
        """As `copy`."""
        if self._closed:
            raise MemoryMisuseError("this copy engine is closed; create another")
        for link, to_device in ((self._to_device, True), (self._from_device, False)):
            if nbytes := sum(len(rows.to) * rows.rows * rows.width for rows in copies if rows.to_device == to_device):
                await link.move(nbytes)

    def close(self) -> None:
        """End it."""
        self._closed = True
