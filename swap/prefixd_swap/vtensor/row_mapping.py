"""Maps frames on rows, one mapping after the other: at once, or in a thread beside the device (vAttention, 6.2)."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from prefixd_swap.errors import OutOfMemoryError
from prefixd_swap.vmem.base import FrameId
from prefixd_swap.vmem.frame_table import FrameTable
from prefixd_swap.vtensor.mapping_ahead import MappingAhead
from prefixd_swap.vtensor.virtual_set import Row, VirtualSet


@dataclass(slots=True)
class MappingCounts:
    """Blocks that requests got since the start.

    mapped: blocks that were mapped.  reused: blocks that were still mapped there by an earlier request.
    copied: blocks whose bytes were copied (copy on write, tails).
    """

    mapped: int = 0
    reused: int = 0
    copied: int = 0


class RowMapping:
    """Makes the mappings of a manager's rows in the order in which they are asked for.

    Not thread-safe: the manager's owner calls it.

    Args:
        virtual: the rows.
        table: the frames' chunks.
        background: a single thread that makes mappings; None: the caller's thread makes them at once.
    """

    def __init__(self, virtual: VirtualSet, table: FrameTable, background: Executor | None) -> None:
        self.counts = MappingCounts()
        self.ahead = MappingAhead(virtual, table, self._is_waited_for)
        """Maps and unmaps on idle rows, by `expect` and `map_ahead`."""
        self.neighbours: Sequence[RowMapping] = ()
        """All of them, this one included, that share the process's mappings and one `background`."""
        self._virtual = virtual
        self._background = background
        self._last: Future[None] | None = None  # the last mapping in the background
        self._round: Future[None] | None = None  # work of `ahead` in the background

    def map(self, row: Row, first: int, frames: list[FrameId]) -> Future[None] | None:
        """Map `frames` on the blocks of `row` from `first` on; see `VirtualSet.map`. None if that is done now.

        Without a mapping left, idle rows of all neighbours are unmapped. Raises as `VirtualSet.map`, or the returned
        future does.
        """
        if self._background is None:
            self._map_now(row, first, frames)
            return None
        self._last = self._background.submit(self._map_now, row, first, frames)
        return self._last

    def expect(self, frames: Sequence[FrameId]) -> None:
        """A request with `frames` as its first blocks will probably come: `map_ahead` maps them where its `create` will
        look for them. Does nothing without `background`: the owner would wait for the mapping all the same."""
        if self._background is not None:
            self.ahead.expect(frames)

    def map_ahead(self) -> None:
        """Begin what may wait, in the background, when the device begins to compute (vAttention, 6.2): map what is
        expected, and unmap idle rows (`MappingAhead`). Raises the error of the device in the background before."""
        if self._background is None or not self.ahead.stale:
            return
        if self._round is None or self._round.done():
            if self._round is not None:
                self._round.result()
            self._round = self._background.submit(self.ahead.work)

    def drain(self) -> None:
        """Wait for all that is done in the background."""
        for job in (self._last, self._round):
            if job is not None:
                job.exception()

    def _map_now(self, row: Row, first: int, frames: list[FrameId]) -> None:
        try:
            mapped = self._virtual.map(row, first, frames)
        except OutOfMemoryError:
            # The process has no mapping left: unmap the idle rows of all neighbours, and try again.
            for mapping in self.neighbours or (self,):
                for idle in list(mapping._virtual.idle()):
                    mapping._virtual.unmap(idle)
            mapped = self._virtual.map(row, first, frames)
        self.counts.mapped += mapped
        self.counts.reused += len(frames) - mapped

    def _is_waited_for(self) -> bool:
        """Whether a request's mapping is queued in the background thread."""
        jobs = [mapping._last for mapping in self.neighbours or (self,)]
        return any(job is not None and not job.done() for job in jobs)
