"""Mapping and unmapping ahead of need, beside the device's work (vAttention, sections 5 and 6.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prefixd_swap.errors import MemoryMisuseError, OutOfMemoryError
from prefixd_swap.vmem.base import FrameId
from prefixd_swap.vmem.frame_table import FrameTable
from prefixd_swap.vtensor.virtual_set import Row, VirtualSet

_PIECE = 16
"""Blocks that are mapped or unmapped before a request's own mapping may go first: about 1 ms of the driver."""
_CLEAN_ROWS = 2
"""Idle rows that are kept without mappings, so that a request that comes unexpected unmaps nothing."""
_HIGH, _LOW = 0.5, 0.25
"""Watermarks of the blocks that are mapped on idle rows, as a part of all frames: above the high one rows are unmapped,
until the low one is reached."""


class MappingAhead:
    """Maps what the next requests are expected to want, and unmaps what idle rows no longer need.

    ```
    expected     frames of a prefix are mapped on an idle row, before the request comes (eager allocation)
    reclaimed    the longest idle rows first, until enough rows are clean and few enough frames are mapped there
    ```

    Only idle rows change, which nothing on the device uses. `work` runs in the manager's background thread; all else is
    called by the manager's owner. A row that the owner takes meanwhile is left alone: what a request needs there is
    mapped behind in the same thread.

    Args:
        virtual: the rows.
        table: the frames' chunks.
        must_yield: whether a request's own mapping waits for the thread.
    """

    def __init__(self, virtual: VirtualSet, table: FrameTable, must_yield: Callable[[], bool]) -> None:
        self._virtual = virtual
        self._table = table
        self._must_yield = must_yield
        self._expected: dict[int, tuple[FrameId, ...]] = {}  # by row; the rows are spared by `reclaim`
        self._unmapped: set[int] = set()  # the expected rows whose frames are not all mapped yet
        self.stale = False
        """Whether there may be something to do: rows have become idle or were taken since the last `work`."""
        self.mapped = 0
        """Blocks that were mapped ahead."""
        self.reclaimed = 0
        """Blocks of idle rows that were unmapped."""

    @property
    def expected_rows(self) -> frozenset[int]:
        """Rows that are kept for requests that are expected."""
        return frozenset(self._expected)

    def expect(self, frames: Sequence[FrameId]) -> None:
        """A request will probably come with these frames as its first blocks; -1 where a block has none.

        Nothing is reserved: the row that has most of them keeps its mappings, and gets the others. At most half of the
        idle rows are kept for expected requests, those expected last.
        """
        most = self._virtual.idle_count // 2
        while self._expected and len(self._expected) >= most:
            self.drop(next(iter(self._expected)))
        idle = [row for row in self._virtual.idle() if row.number not in self._expected]
        if most == 0:
            return
        row = max(idle, key=lambda row: (row.common(frames), not row.mapped_blocks))
        self._virtual.make_newest(row)
        self._expected[row.number] = tuple(frames[: self._virtual.blocks])
        self._unmapped.add(row.number)
        self.stale = True

    def take(self, row: int) -> None:
        """A request has taken the row."""
        self.drop(row)
        self.stale = True

    def drop(self, row: int) -> None:
        """Keep the row for no request any more."""
        self._expected.pop(row, None)
        self._unmapped.discard(row)

    def forget(self, frames: set[FrameId]) -> None:
        """These frames are about to be no more."""
        for row in [row for row, expected in self._expected.items() if not frames.isdisjoint(expected)]:
            self.drop(row)

    def work(self) -> None:
        """Map and unmap, piece by piece, until nothing is left or a request's own mapping waits.

        Raises DeviceError. Without a mapping left it ends: the request will unmap idle rows.
        """
        self.stale = False
        try:
            for _ in self._pieces():
                if self._must_yield():
                    self.stale = True
                    return
        except OutOfMemoryError:
            for row in list(self._unmapped):
                self.drop(row)

    def _pieces(self) -> Iterator[None]:
        for number in list(self._unmapped):
            frames = self._expected.get(number, ())
            for first in range(0, len(frames), _PIECE):
                if number not in self._expected:
                    break
                try:
                    self.mapped += self._virtual.map(self._virtual.rows[number], first, frames[first : first + _PIECE])
                except MemoryMisuseError:  # a frame has gone since
                    break
                yield
            else:
                self._unmapped.discard(number)
                continue
            self.drop(number)
        for row in self._to_reclaim():
            stop = self._virtual.blocks
            while row.mapped_blocks and self._virtual.is_idle(row):
                held = row.held_blocks(0, stop)
                stop = held[-_PIECE] if len(held) >= _PIECE else 0
                self.reclaimed += self._virtual.unmap(row, stop)
                yield

    def _to_reclaim(self) -> Iterator[Row]:
        """The rows to unmap, the longest idle first."""
        # Copied at once: the owner takes and gives back rows meanwhile.
        idle = [row for row in list(self._virtual.idle()) if row.number not in self._expected]
        clean = sum(not row.mapped_blocks for row in idle)
        held = sum(row.mapped_blocks for row in idle)
        frames = self._table.size
        most = frames * (_LOW if held > frames * _HIGH else _HIGH)
        for row in idle:
            if not row.mapped_blocks:
                continue
            if clean >= _CLEAN_ROWS and held <= most:
                return
            clean += 1
            held -= row.mapped_blocks
            yield row
