"""What is where: every copy entered into or dropped from a trie passes here, and its slots with it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prefixd.cache.index.trie import CPU, DISK, NO_SLOT, TIERS, Rows, Trie
from prefixd.cache.tiers import Tiers


class Placement:
    """Keeps tries and tiers in step.

    Args:
        tiers: the memory.
        clock: seconds; passed in so that tests own the time.
    """

    def __init__(self, tiers: Tiers, clock: Callable[[], float]) -> None:
        self.tiers = tiers
        self.clock = clock
        self.lost: Counter[str] = Counter()  # blocks that could have been kept, by reason
        self.epoch = 0  # grows with every change of what is where
        self.changed = asyncio.Event()  # set when write-back may have work
        self.queued_blocks = 0  # in the CPU tier and not on disk
        self.queued_bytes = 0

    def put(self, trie: Trie, row: int, tier: int, slots: Sequence[int]) -> None:
        """Enters a copy into the trie; its slots belong to the trie from here on."""
        before = _is_queued(trie, row)
        trie.put_copy(row, tier, slots, self.clock())
        self._count_queue(trie, row, before)
        if tier != DISK:
            self.tiers.in_flight[tier].difference_update(slots)
        self.epoch += 1

    def put_lacking(self, trie: Trie, row: int, tier: int, slots: Sequence[int]) -> bool:
        """Enters the parts that the block lacks in `tier` and releases the other slots; False if it lacked none."""
        there = trie.slots[row, tier].tolist()
        spare = [slot for slot, have in zip(slots, there, strict=True) if have != NO_SLOT]
        fresh = [slot if have == NO_SLOT else NO_SLOT for slot, have in zip(slots, there, strict=True)]
        entered = any(slot != NO_SLOT for slot in fresh)
        if entered:
            self.put(trie, row, tier, fresh)
        self.tiers.release(tier, spare)
        return entered

    def drop(self, trie: Trie, rows: Iterable[int], tier: int) -> int:
        """Drops copies that nobody holds and that are not the last of a block that has to stay; returns how many."""
        dropped = 0
        for row in rows:
            last = int(trie.some[row]) == 1 << tier
            if trie.holds[row, tier] or not trie.some[row] & (1 << tier) or (last and not trie.removable(row)):
                continue
            self.discard_copy(trie, row, tier)
            self.tiers.counters[tier].evicted += 1
            dropped += 1
            if last:
                trie.remove(row)
                if tier != DISK and self.tiers.disk is not None:
                    self.lost[f"evicted before it was written: {self.why_unwritten()}"] += 1
        self.epoch += 1
        return dropped

    def discard(self, trie: Trie, row: int) -> None:
        """Drops a removable block from every tier."""
        for tier in range(TIERS):
            if trie.some[row] & (1 << tier):
                self.discard_copy(trie, row, tier)
        trie.remove(row)
        self.epoch += 1

    def discard_copy(self, trie: Trie, row: int, tier: int) -> None:
        """Drops one copy, whoever holds it."""
        before = _is_queued(trie, row)
        slots = trie.drop_copy(row, tier)
        self._count_queue(trie, row, before)
        if tier != DISK:
            self.tiers.release(tier, slots)
        self.epoch += 1

    def why_unwritten(self) -> str:
        """Why a block could not be written to disk now, for `lost`."""
        return "no room on disk" if self.tiers.disk_takes else "disk out of service"

    def unhold(self, trie: Trie, rows: Rows, tier: int) -> None:
        """Ends one hold of each row."""
        trie.unhold(rows, tier)
        self.sweep(trie, rows)

    def sweep(self, trie: Trie, rows: Rows) -> None:
        """Forgets blocks that lost their last copy while somebody kept them, once nobody does."""
        for row in rows[trie.some[rows] == 0].tolist()[::-1]:
            if trie.removable(row):
                trie.remove(row)
                self.epoch += 1

    def _count_queue(self, trie: Trie, row: int, before: bool) -> None:
        change = _is_queued(trie, row) - before
        self.queued_blocks += change
        self.queued_bytes += change * sum(trie.part_bytes)


def _is_queued(trie: Trie, row: int) -> bool:
    """Whether the block waits in the CPU tier to be written to disk."""
    return bool(trie.whole[row] & (1 << CPU)) and not trie.some[row] & (1 << DISK)
