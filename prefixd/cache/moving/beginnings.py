"""The longest beginning of a cached prefix for which the shared tier has room: held, and brought there.

A prompt may be longer than the tier, or than what others' leases leave of it. Its last blocks are often in the tier
while its first ones are on disk. Example, a tier of 8 blocks and a prompt of 12:

    block                       0 1 2 3 4 5 6 7 8 9 a b
    in the tier                         x x x x x x x x
    held, nothing can come      h h h h h h h h h h h h     8 blocks' bytes are there
    held for 8 blocks           h h h h h h h h             8 to b may go
    in the tier                 x x x x x x x x

Each time that room runs out, the hold is cut to the blocks that fit into the room of the bytes it has in the tier. Each
cut makes it shorter, so the loop ends. No prefix waits for blocks that another one holds, so there is no deadlock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import numpy as np

from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.moving.mover import Mover
from prefixd.cache.placement.holds import Hold
from prefixd.cache.rules import GroupMask, needed_bytes
from prefixd_swap.tiers import Int64s, MemoryTier

_IN_VAIN = 3  # cuts after which no further block had arrived

Bring = Callable[[Trie, Rows, MemoryTier, GroupMask | None], Awaitable[int]]
"""(trie, rows, tier, wanted): see `Mover.bring`."""


@dataclass(frozen=True, slots=True, eq=False)
class Reader:
    """Reads blocks `first_block` to `end` of a usable prefix.

    Attributes:
        trie: the blocks' trie.
        path: [n] the prefix from its first block on. The rules say which bytes a reader of these n blocks needs.
        first_block: the reader has the blocks before it.
        end: the reader needs no block from here on.
        slice_only: other leases read the rest of `path`. Otherwise the prompt continues behind `end`, which must be a
            length that the rules allow.
    """

    trie: Trie
    path: Rows
    first_block: int
    end: int
    slice_only: bool = False

    @property
    def rows(self) -> Rows:
        """The blocks to read."""
        return self.path[self.first_block : self.end]

    @property
    def wanted(self) -> GroupMask:
        """[len(rows)]: the KV groups of each that are needed."""
        return self.trie.needed(len(self.path), min(self.first_block, len(self.path)))[: len(self.rows)]

    def cut(self, end: int) -> Reader:
        """The reader of the longest part of this one's blocks that ends at `end` or before it."""
        if self.slice_only:
            return replace(self, end=end)
        path = self.trie.usable(self.path[:end])
        return replace(self, path=path, end=len(path))

    def cut_to_bytes(self, room_bytes: int, nbytes: Int64s) -> Reader:
        """The longest reader, shorter than this one, that needs at most `room_bytes`.

        Args:
            room_bytes: the limit.
            nbytes: [groups, len(rows)], bytes of the room that each group of each block takes.
        """
        shorter = max(self.end - 1, self.first_block)
        if self.slice_only:
            wanted = [(self.wanted & np.uint8(group.mask)) != 0 for group in self.trie.groups]
            needed = np.cumsum((nbytes * wanted).sum(axis=0))
            fitting = self.first_block + int(np.searchsorted(needed, room_bytes, side="right"))
            return self.cut(min(fitting, shorter))
        fits = self.trie.usable_lengths(self.path[:shorter])
        before = np.zeros((len(nbytes), self.first_block), np.int64)
        fits &= needed_bytes(self.trie.groups, self.first_block, np.hstack([before, nbytes]))[: len(fits)] <= room_bytes
        return self.cut(int(np.flatnonzero(fits)[-1]))


class Beginning:
    """Holds the bytes that a reader needs in the shared tier; they are there when `bring` has returned.

    `reader` may be a shorter one by then. The hold begins at once. It is not counted, since it ends soon or becomes a
    lease.

    Args:
        mover: brings blocks.
        owner: name of the hold.
        reader: the blocks to read.
        uncut: beginnings that have not run out of room yet and hold all their blocks; this one is added.
    """

    def __init__(self, mover: Mover, owner: str, reader: Reader, uncut: set[Beginning]) -> None:
        self._mover = mover
        self._tier = mover.tiers.shared
        self._owner = owner
        self._uncut = uncut
        self._left_uncut = asyncio.Event()  # set when it is not uncut any more
        self.reader = reader
        self.hold = self._hold(reader)
        uncut.add(self)

    async def bring(self, bring: Bring | None = None, give_way: Callable[[], Awaitable[bool]] | None = None) -> None:
        """Brings the longest beginning that fits. If it fails, nothing is held.

        Args:
            bring: brings blocks; `Mover.bring` by default.
            give_way: called when room runs out for the first time; returns whether others have released some.
        """
        bring = bring or self._mover.bring
        waits, there, in_vain = True, -1, 0
        try:
            while True:
                came = await bring(self.hold.trie, self.hold.rows, self._tier, self.hold.wanted)
                if came == len(self.hold.rows):
                    break
                in_vain = 0 if came > there else in_vain + 1
                there = came
                if give_way is not None and await give_way():
                    pass
                elif self in self._uncut:
                    self.cut(self._fitting())
                    self._leave_uncut()
                elif waits and (others := self._uncut_of_same_prompt()):
                    await asyncio.wait([asyncio.ensure_future(other._left_uncut.wait()) for other in others])
                    waits = False
                elif in_vain >= _IN_VAIN:  # room is not the cause: the next block is damaged or cannot be read
                    self.cut(self.reader.cut(self.reader.first_block + came))
                else:
                    self.cut(self._fitting())
                give_way = None
        except BaseException:
            self.hold.end()
            raise
        finally:
            self._leave_uncut()

    def _leave_uncut(self) -> None:
        self._uncut.discard(self)
        self._left_uncut.set()

    def _uncut_of_same_prompt(self) -> list[Beginning]:
        """Other uncut beginnings of the same prompt. They release blocks when they run out of room, and do not wait
        before."""
        trie, first = self.reader.trie, self.reader.path[:1].tolist()
        return [
            other
            for other in self._uncut
            if other is not self and other.reader.trie is trie and other.reader.path[:1].tolist() == first
        ]

    def cut(self, reader: Reader) -> None:
        """Replaces the hold with that of a shorter reader."""
        longer, self.hold, self.reader = self.hold, self._hold(reader), reader
        longer.end()

    def keep(self) -> Hold:
        """Counts the hold from now on and returns it."""
        self.hold.count_in(self._tier)
        return self.hold

    def _fitting(self) -> Reader:
        """The longest reader that fits into the room of the bytes that only this one has in the tier.

        Bytes that leases hold too stay in any case, so they need no room. Holds of other beginnings, perhaps
        of the same blocks, are ignored: each of them computes the same length.
        """
        trie, reader = self.reader.trie, self.reader
        rows, wanted = reader.rows, reader.wanted
        there = wanted & ~trie.lacking(rows, self._tier.level, wanted)
        leases = self._mover.use.held.holders(trie, self._tier)[rows]
        sizes = self._mover.use.group_bytes(trie, self._tier)
        nbytes = np.zeros((len(trie.groups), len(rows)), np.int64)
        room_bytes = 0
        for group in trie.groups:
            nbytes[group.bit, leases[:, group.bit] == 0] = sizes[group.mask]
            room_bytes += int(nbytes[group.bit, (there & np.uint8(group.mask)) != 0].sum())
        return reader.cut_to_bytes(room_bytes, nbytes)

    def _hold(self, reader: Reader) -> Hold:
        wanted = reader.wanted if reader.trie.has_rules else None
        return self._mover.placement.holds.hold(self._owner, reader.trie, reader.rows, self._tier, wanted)
