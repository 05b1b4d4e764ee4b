"""The scrubber: reads the blocks on disk and drops damaged ones.

It finds blocks in the tries, some thousand rows at a time, and reads them in the order of their slots. A block that was
dropped or replaced between finding and reading is skipped. A block that looks damaged is read again while the store
does not change, so that a block that is just being replaced is not taken for damaged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import give_way
from prefixd.cache.disk.copies import DiskCopies
from prefixd.cache.disk.damaged_blocks import Damage
from prefixd.cache.index.trie import DISK, Rows, Trie
from prefixd.cache.moving.mover import Mover
from prefixd_swap import IndexUnavailableError, StorageError, round_to_slot

log = logging.getLogger(__name__)

_WINDOW_ROWS = 16_384  # rows sorted by slot at once: enough to read forward, few enough to keep in memory
_BATCH_BYTES = 1 << 20  # read by one call into a thread
_BATCH_BLOCKS = 64
_LEAST_BYTES = 16 << 10  # a smaller block counts as this: it costs the same time of the event loop
_VERIFY_DEPTH = 8  # reads in flight: as fast as 16, and a tenth to two thirds faster than 4 or 1 (2 cores, O_DIRECT)
_TROUBLE_PAUSE_S = 5.0
_FAILURE_PAUSE_S = 60.0
_DEVICE_FAILURES = 4  # this many unreadable blocks, and no readable one, mean a failing device


@dataclass(slots=True)
class ScrubCounters:
    """Blocks checked since the start, in the background and on demand."""

    checked_blocks: int = 0
    checked_bytes: int = 0
    damaged_blocks: int = 0
    passes: int = 0  # complete passes over the disk tier


class _Block(NamedTuple):
    """A block as it was when it was found."""

    trie: Trie
    row: int
    generation: int


@dataclass(slots=True)
class ScrubProgress:
    """The progress of one pass."""

    total_blocks: int
    checked_blocks: int = 0
    checked_bytes: int = 0
    damaged_blocks: int = 0
    altered_blocks: int = 0
    """Checked blocks that a lossy codec has altered."""
    dropped_blocks: int = 0
    """Damaged blocks and their descendants."""
    damaged: list[Damage] = field(default_factory=list)
    """Damaged blocks since the reader of the progress last removed them from this list."""
    unreadable: list[_Block] = field(default_factory=list)
    """Blocks that the device failed to read since it last read another one; after that, these blocks are damaged."""


class TokenBucket:
    """Limits reads to `bytes_per_s`, with bursts of one second's bytes."""

    def __init__(self, bytes_per_s: int, now_s: float) -> None:
        self._rate = bytes_per_s
        self._left = float(bytes_per_s)
        self._at_s = now_s

    def take(self, nbytes: int, now_s: float) -> float:
        """Takes `nbytes` for the next read; returns the seconds to wait before it."""
        self._left = min(self._left + (now_s - self._at_s) * self._rate, self._rate)
        self._at_s = now_s
        self._left -= nbytes
        return max(-self._left / self._rate, 0.0)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Blocks to read in one call, with the generations of their rows."""

    trie: Trie
    rows: Rows
    generations: npt.NDArray[np.int32]

    def still_there(self, disk: DiskCopies) -> list[_Block]:
        """The blocks that are unchanged and still on disk."""
        trie, rows = self.trie, self.rows
        same = (trie.generation[rows] == self.generations) & np.isin(rows, disk.records.stored(trie, rows))
        pairs = zip(rows[same].tolist(), self.generations[same].tolist(), strict=True)
        return [_Block(trie, row, generation) for row, generation in pairs]


class Scrubber:
    """Checks every block on disk, periodically in the background and on demand.

    Args:
        mover: the tries, and the disk tier.
        clock: seconds, monotonic.
        bytes_per_s: the most that the background task reads; 0: it does not run.
        every_s: the least time from the start of one background pass to the next.
        sleep: used by the background task; replaced in tests.
    """

    def __init__(
        self,
        mover: Mover,
        clock: Callable[[], float],
        *,
        bytes_per_s: int = 0,
        every_s: float = 3600.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.counters = ScrubCounters()
        self._mover = mover
        self._tiers = mover.tiers
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._every_s = every_s
        self._sleep = sleep
        self._task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None] | None:
        """Starts reading in the background, if there is a disk tier and a rate; the task ends with `stop`."""
        if self._bytes_per_s and self._tiers.durable is not None:
            self._task = asyncio.create_task(self._run(), name="scrubber")
        return self._task

    async def stop(self) -> None:
        """Ends the background task."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # how it ended is its watcher's to report
            self._task = None

    async def verify(self, *, depth: int = _VERIFY_DEPTH) -> AsyncGenerator[ScrubProgress, None]:
        """Checks all blocks on disk, `depth` reads at a time; yields the same progress object after each step.

        Closing the generator ends the reads. Several may run at once.

        Raises:
            StorageError: the device fails, or the index cannot be read; blocks checked before are counted.
        """
        progress = ScrubProgress(self._blocks_on_disk())
        batches = self._batches()
        reads: set[asyncio.Task[None]] = set()
        try:
            while True:
                while len(reads) < depth and (batch := next(batches, None)) is not None:
                    reads.add(asyncio.create_task(self._check(batch, progress)))
                if not reads:
                    break
                done, reads = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
                failures = [error for read in done if (error := read.exception())]  # of all: they fail together
                if failures:
                    raise failures[0]
                yield progress
        finally:
            for read in reads:
                read.cancel()
            if reads:
                await asyncio.wait(reads)
        if progress.unreadable:
            raise StorageError(f"the device read none of the last {len(progress.unreadable)} blocks; look at its log")
        progress.total_blocks = progress.checked_blocks  # blocks were added or removed since the beginning
        self.counters.passes += 1
        yield progress

    # -- in the background ----------------------------------------------------------------------------------------

    async def _run(self) -> None:
        bucket = TokenBucket(self._bytes_per_s, self._clock())
        while True:
            began_s = self._clock()
            try:
                await self._pass(bucket)
            except StorageError as error:
                log.error("the scrubber pauses for %g s: %s", _FAILURE_PAUSE_S, error)
                await self._sleep(_FAILURE_PAUSE_S)
                continue
            await self._sleep(max(began_s + self._every_s - self._clock(), 0.0))

    async def _pass(self, bucket: TokenBucket) -> None:
        progress = ScrubProgress(0)
        for batch in self._batches():
            store = self._tiers.durable
            while store is not None and not (store.writable and store.readable):
                await self._sleep(_TROUBLE_PAUSE_S)
            nbytes = max(_bytes_on_disk(batch.trie), _LEAST_BYTES)
            wait_s = bucket.take(len(batch.rows) * nbytes, self._clock())
            if wait_s:
                await self._sleep(wait_s)
            await self._check(batch, progress)
            progress.damaged.clear()
        self.counters.passes += 1

    # -- both -----------------------------------------------------------------------------------------------------

    def _blocks_on_disk(self) -> int:
        return sum(int(np.count_nonzero(trie.there[: trie.rows, DISK])) for trie in self._mover.tries)

    def _batches(self) -> Iterator[_Batch]:
        """All blocks on disk, found as late as possible."""
        store = self._tiers.durable
        if store is None:
            return
        for trie in list(self._mover.tries):
            blocks = max(1, min(_BATCH_BLOCKS, _BATCH_BYTES // _bytes_on_disk(trie)))
            first = 0
            while first < trie.rows:
                end = min(first + _WINDOW_ROWS, trie.rows)
                rows = self._mover.disk.records.stored(trie, np.arange(first, end))
                rows = rows[np.argsort(trie.slots[rows, store.level, 0])]
                generations = trie.generation[rows]
                for start in range(0, len(rows), blocks):
                    yield _Batch(trie, rows[start : start + blocks], generations[start : start + blocks])
                first = end

    async def _check(self, batch: _Batch, progress: ScrubProgress) -> None:
        """Reads a batch at low urgency, and drops damaged blocks.

        Raises:
            StorageError: several reads in a row have failed, or the index cannot be read.
        """
        disk, trie, store = self._mover.disk, batch.trie, self._tiers.durable
        blocks = batch.still_there(disk)
        if not blocks or store is None:
            await give_way()  # many batches may have gone
            return
        expected = disk.records.expected(trie, np.array([block.row for block in blocks]))
        results = await store.verify(expected, sum(trie.part_bytes))
        suspects: dict[int, StorageError] = {}
        for position, error in enumerate(results):
            if isinstance(error, IndexUnavailableError) or not isinstance(error, StorageError | None):
                raise error  # it does not tell which blocks are damaged
            if error is not None:
                suspects[position] = error
        for counts in (self.counters, progress):
            counts.checked_blocks += sum(any(record.parts) for record in expected)
            counts.checked_bytes += sum(round_to_slot(part.nbytes) for each in expected for part in each.parts if part)
        progress.altered_blocks += sum(record.errors is not None for record in expected)
        progress.unreadable += [blocks[at] for at, error in suspects.items() if _is_device_failure(error)]
        doubtful = [blocks[at] for at, error in suspects.items() if not _is_device_failure(error)]
        if len(suspects) < len(blocks) or doubtful:
            doubtful += progress.unreadable
            progress.unreadable = []
        elif len(progress.unreadable) >= _DEVICE_FAILURES:
            raise next(iter(suspects.values()))
        for block in doubtful:
            damage = await disk.reads.recheck(block.trie, block.row, block.generation)
            if damage is not None:
                self.counters.damaged_blocks += 1
                progress.damaged_blocks += 1
                progress.dropped_blocks += damage.dropped
                progress.damaged.append(damage)


def _bytes_on_disk(trie: Trie) -> int:
    return sum(map(round_to_slot, trie.part_bytes))


def _is_device_failure(error: StorageError) -> bool:
    """Whether the kernel refused the read; wrong bytes and a file that is too short are damage of the block."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno is not None
