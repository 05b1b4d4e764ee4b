"""Computes checksums of committed blocks at once, so that a later change in memory is found when they are read.

A part of a block is *checksummed* while the trie's checksum is that of its bytes in the CPU tier: computed by the
commit that filled it, by the write to disk, or by the read from disk. The index gets that checksum even if memory has
changed since. A block computed in GPU memory is checksummed when it is copied to memory that a CPU can read, or when
it is written to disk if that is earlier.
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
"""Hashed on the event loop up to here: 50 us for the bytes and 1 us a part; a thread's round trip costs 150 us."""


class Checksums:
    """Computes checksums.

    Args:
        placement: ends the holds.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._pending: list[dict[int, asyncio.Task[None]]] = []
        """By trie ordinal and row: the last task for the block, which waits for earlier ones. No object per block: a
        garbage collection visits each, 10 ms for a long prompt."""
        self.tasks: set[asyncio.Task[None]] = set()
        """Tasks under way."""
        self._threads = started_threads(_THREADS, "prefixd-checksums")

    def close(self) -> None:
        """Stops the threads."""
        self._threads.shutdown()

    def begin(self, trie: Trie, rows: Rows) -> None:
        """Hashes the parts of `rows` in the CPU tier that have no checksum. Long work runs in a thread; its rows are
        held.

        Does nothing without a disk tier or a shared store, which alone use checksums, or if the tier has no memory.
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
        """Waits for the tasks under way for `rows`."""
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
        """Waits until no task is under way."""
        while self.tasks:
            await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)

    async def _hash(
        self, hold: Hold, todo: npt.NDArray[np.bool_], slots: Slots, before: set[asyncio.Task[None]]
    ) -> None:
        """Hashes the parts `todo`, [m, parts], of the held blocks, which are in `slots`, and waits for `before`."""
        trie, rows = hold.trie, hold.rows
        which, parts = np.nonzero(todo)
        try:
            checksums = await asyncio.get_running_loop().run_in_executor(
                self._threads, self._hash_parts, slots[which, parts].tolist(), parts.tolist(), trie.part_bytes
            )
            level = self._tiers.shared.level
            there = trie.slots[rows[which], level, parts] != NO_SLOT  # the hold keeps the slot
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
        """The checksums of the parts in `slots`. Runs in a thread or on the event loop."""
        addresses = self._tiers.shared.addresses(np.array(slots, np.int64)).tolist()
        spans = [Span(address, part_bytes[part]) for address, part in zip(addresses, parts, strict=True)]
        return [xxhash.xxh3_64_intdigest(host_bytes(span, span.nbytes)) for span in spans]
