"""Checksums of what was committed, taken at once: bytes that change in memory afterwards are found when they come up.

A part of a block is *sealed* while its bytes in the CPU tier are those that the trie's checksum was taken of: by the
commit that filled it, by the write to disk, or when it was read from there. The checksum of a sealed part goes to the
index as it is, whatever is in memory by then. A block that was computed in GPU memory is sealed when its bytes first
come to memory that a CPU can read (or hashed by the write, if that is earlier).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from prefixd.cache.index.trie import CPU, NO_SLOT, Rows, Trie
from prefixd.cache.placement import Placement
from prefixd_swap import Span, host_bytes

_THREADS = 2


class Checksums:
    """Checksums under way.

    Args:
        placement: ends the holds.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._pending: dict[tuple[int, int], set[asyncio.Task[None]]] = {}  # by (trie, row)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="prefixd-seals")

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """Those under way."""
        return {task for tasks in self._pending.values() for task in tasks}

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    def begin(self, trie: Trie, rows: Rows) -> None:
        """Starts hashing the parts of `rows` in the CPU tier that are not sealed; the rows are held meanwhile.

        Without a disk tier nobody asks for checksums, and nothing is done.
        """
        if self._tiers.disk is None:
            return
        work: list[tuple[int, int, Span]] = [
            (row, part, self._tiers.span(CPU, slot, nbytes))
            for row in rows.tolist()
            for part, (slot, nbytes) in enumerate(zip(trie.slots[row, CPU].tolist(), trie.part_bytes, strict=True))
            if slot != NO_SLOT and not trie.sealed[row, part]
        ]
        if not work:
            return
        held = np.unique([row for row, _, _ in work])
        trie.hold(held, CPU)
        task = asyncio.create_task(self._seal(trie, held, work))
        for row in held.tolist():
            self._pending.setdefault((trie.ordinal, row), set()).add(task)

    async def wait(self, trie: Trie, rows: Rows) -> None:
        """Waits until what is under way for `rows` is done."""
        tasks = {task for row in rows.tolist() for task in self._pending.get((trie.ordinal, row), ())}
        if tasks:
            await asyncio.wait(tasks)

    async def settle(self) -> bool:
        """Waits until a part of what is under way is done, and its holds are over; False when nothing is."""
        tasks = self.tasks
        if not tasks:
            return False
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return True

    async def _seal(self, trie: Trie, held: Rows, work: Sequence[tuple[int, int, Span]]) -> None:
        try:
            spans = [span for _, _, span in work]
            checksums = await asyncio.get_running_loop().run_in_executor(self._threads, _hash, spans)
            for (row, part, _), checksum in zip(work, checksums, strict=True):
                if trie.slots[row, CPU, part] != NO_SLOT:  # it was held, so it is the same slot
                    trie.seal(row, part, checksum)
        finally:
            task = asyncio.current_task()
            for row in held.tolist():
                pending = self._pending[trie.ordinal, row]
                pending.discard(task)
                if not pending:
                    del self._pending[trie.ordinal, row]
            self._placement.unhold(trie, held, CPU)


def _hash(spans: Sequence[Span]) -> list[int]:
    return [xxhash.xxh3_64_intdigest(host_bytes(span, span.nbytes)) for span in spans]
