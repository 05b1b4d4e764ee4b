"""Checksums of what was committed, taken at once: bytes that change in memory afterwards are found when they come up.

A part of a block is *checksummed* while its bytes in the CPU tier are those that the trie's checksum was taken of: by
the commit that filled it, by the write to disk, or when it was read from there. Its checksum goes to the index as it
is, whatever is in memory by then. A block that was computed in GPU memory is checksummed when its bytes first come to
memory that a CPU can read, or by the write to disk if that is earlier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.placement.holds import Hold
from prefixd.cache.placement.placement import Placement
from prefixd.cache.tiers import Slots
from prefixd_swap import Span, host_bytes, started_threads

_THREADS = 2
_BLOCKS = 256  # hashed by one task
_INLINE_BYTES, _INLINE_PARTS = 1 << 20, 64
"""As much is hashed at once, on the event loop: 50 us for the bytes and 1 us a part, where handing it to a thread and
back costs 150."""


class Checksums:
    """Checksums under way.

    Args:
        placement: ends the holds.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._pending: list[dict[int, asyncio.Task[None]]] = []
        """By the trie's ordinal and the row, the last task for the block, which waits for those before. No object a
        block: a garbage collection looks at each, 10 ms for those of a long prompt."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Those under way."""
        self._threads = started_threads(_THREADS, "prefixd-checksums")

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def begin(self, trie: Trie, rows: Rows) -> None:
        """Hashes the parts of `rows` in the CPU tier that have no checksum. What takes long is only begun here, and its
        rows are held meanwhile.

        Without a disk tier or a shared store nobody asks for checksums, and without bytes there is nothing to hash.
        """
        shared = self._tiers.shared
        if (self._tiers.durable is None and self._tiers.remote is None) or not shared.backed:
            return
        parts, nbytes = len(rows) * len(trie.part_bytes), len(rows) * sum(trie.part_bytes)
        inline = parts <= _INLINE_PARTS and nbytes <= _INLINE_BYTES
        for start in range(0, len(rows), _BLOCKS):
            some = rows[start : start + _BLOCKS]
            todo = (trie.slots[some, shared.level] != NO_SLOT) & ~trie.checksummed[some]
            some, todo = some[todo.any(axis=1)], todo[todo.any(axis=1)]
            if inline and len(some):
                which, lacking = np.nonzero(todo)
                slots = trie.slots[some[which], shared.level, lacking].tolist()
                checksums = self._hash_parts(slots, lacking.tolist(), trie.part_bytes)
                trie.set_part_checksums(some[which], lacking, np.array(checksums, np.uint64))
            elif len(some):
                hold = self._placement.holds.hold("checksums", trie, some, shared)
                before = self._under_way(trie, some)
                task = asyncio.create_task(self._hash(hold, todo, trie.slots[some, shared.level], before))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
                self._of(trie).update(dict.fromkeys(some.tolist(), task))

    async def wait(self, trie: Trie, rows: Rows) -> None:
        """Waits until what is under way for `rows` is done."""
        tasks = self._under_way(trie, rows)
        if tasks:
            await asyncio.wait(tasks)

    def _of(self, trie: Trie) -> dict[int, asyncio.Task[None]]:
        while len(self._pending) <= trie.ordinal:
            self._pending.append({})
        return self._pending[trie.ordinal]

    def _under_way(self, trie: Trie, rows: Rows) -> set[asyncio.Task[None]]:
        """The last tasks for `rows`."""
        pending = self._of(trie)
        return {pending[row] for row in rows.tolist() if row in pending}

    async def wait_for_all(self) -> None:
        """Waits until no block is held for its checksum's sake."""
        while self.tasks:
            await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _hash(
        self, hold: Hold, todo: npt.NDArray[np.bool_], slots: Slots, before: set[asyncio.Task[None]]
    ) -> None:
        """Hashes the parts `todo` of the held blocks, [m, parts], that lie in `slots`, and waits for `before`."""
        trie, rows = hold.trie, hold.rows
        which, parts = np.nonzero(todo)
        try:
            checksums = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._hash_parts, slots[which, parts].tolist(), parts.tolist(), trie.part_bytes
            )
            level = self._tiers.shared.level
            there = trie.slots[rows[which], level, parts] != NO_SLOT  # it was held, so it is the same slot
            trie.set_part_checksums(rows[which[there]], parts[there], np.array(checksums, np.uint64)[there])
            if before:
                await asyncio.wait(before)
        finally:
            task, pending = asyncio.current_task(), self._of(trie)
            for row in rows.tolist():
                if pending.get(row) is task:
                    del pending[row]
            hold.end()

    def _hash_parts(self, slots: Sequence[int], parts: Sequence[int], part_bytes: Sequence[int]) -> list[int]:
        """The checksums of parts that lie in `slots`. Much is hashed in a thread."""
        addresses = self._tiers.shared.addresses(np.array(slots, np.int64)).tolist()
        spans = [Span(address, part_bytes[part]) for address, part in zip(addresses, parts, strict=True)]
        return [xxhash.xxh3_64_intdigest(host_bytes(span, span.nbytes)) for span in spans]
