"""Writes blocks that other hosts may want to a shared store, in the background, by a policy.

No request waits for it. A block that leaves this host's memory first is not written.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from typing import Literal, Protocol

import numpy as np

from prefixd.base.long_work.pacer import Pacer, give_way
from prefixd.cache.index.scan import SCANNED_AT_ONCE, slices
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.placement.movement import Movement
from prefixd.cache.placement.paths import find_ancestry
from prefixd.cache.placement.placement import Placement
from prefixd.cache.placement.unwritten import UnwrittenBlocks
from prefixd.cache.remote.copies import RemoteCopies
from prefixd_swap import SwapError
from prefixd_swap.tiers import MemoryTier, RemoteTier, Tier, can_move
from prefixd_swap.transfers import Urgency

log = logging.getLogger(__name__)

SharePolicy = Literal["all", "reused", "pinned", "none"]
"""all: every block. reused: blocks used again. pinned: pinned prefixes. none: this host only reads."""

CopyAhead = Callable[[Trie, Rows, Tier, Tier, Movement], Awaitable[int]]
"""(trie, rows, source, target, movement): copies rows, held in `source`, without evicting; returns how many."""

_BATCH = 64
_RETRY_S = 2.0
_SCAN_S = 0.2
"""Time between scans for new blocks, in which a prompt's blocks come together."""


class Sharing:
    """Writes blocks to a shared store in the background.

    Args:
        tier: the store's tier.
        placement: records where blocks are.
        tries: all tries, by ordinal.
        copies: writes blocks.
        copy_ahead: copies blocks that a CPU cannot read to the shared tier.
        policy: selects the blocks to write.
    """

    def __init__(
        self,
        tier: RemoteTier,
        placement: Placement,
        tries: list[Trie],
        copies: RemoteCopies,
        copy_ahead: CopyAhead,
        policy: SharePolicy,
    ) -> None:
        self.written = 0
        """Blocks that this host has written to the store, or found there, since the start."""
        self._tier = tier
        self._placement = placement
        self._tiers = placement.tiers
        self._tries = tries
        self._copies = copies
        self._copy_ahead = copy_ahead
        self._policy = policy
        self._queues: dict[tuple[int, int], _Queue] = {}  # by trie ordinal and source level
        self._stopping = asyncio.Event()
        self._seen_epoch = -1
        self._scanned_s = -math.inf

    async def run(self) -> None:
        """Writes blocks until `stop`."""
        while self._policy != "none" and not self._stopping.is_set():
            pause_s = _SCAN_S
            # A use or a pin does not change the epoch, so for these policies scan periodically.
            due = self._policy != "all" and self._placement.clock() >= self._scanned_s + _RETRY_S
            if self._tier.writable and (due or self._seen_epoch != self._placement.epoch):
                self._seen_epoch, self._scanned_s = self._placement.epoch, self._placement.clock()
                try:
                    if not await self.write_all():
                        self._seen_epoch, pause_s = -1, _RETRY_S
                except SwapError as error:
                    log.error("blocks could not be shared and are tried again: %s", error)
                    self._seen_epoch, pause_s = -1, _RETRY_S
            try:
                await asyncio.wait_for(self._stopping.wait(), pause_s)
            except TimeoutError:
                continue

    def stop(self) -> None:
        """Ends `run` after the batch under way."""
        self._stopping.set()

    async def write_all(self) -> bool:
        """Writes all waiting blocks; returns False if some could not be written."""
        complete = True
        for trie in list(self._tries):
            for source in (self._tiers.shared, self._tiers.compute):
                if not self._tiers.exists(source):
                    continue
                queue = self._queue(trie, source)
                while not self._stopping.is_set() and len(rows := await queue.next(_BATCH)):
                    generations = trie.generation[rows]
                    self.written += await self._write(trie, rows, source)
                    rows = rows[trie.generation[rows] == generations]
                    if trie.unwritten(rows, source.level, self._tier.level).any():
                        queue.begin_again()
                        complete = False
                        break
                await give_way()
        return complete

    async def _write(self, trie: Trie, rows: Rows, source: MemoryTier) -> int:
        movement = Movement(Urgency.WRITE_BACK)
        with ExitStack() as held:
            held.enter_context(self._placement.holds.hold("sharing", trie, rows, source))
            if not can_move(source, self._tier):
                shared = self._tiers.shared
                held.enter_context(self._placement.holds.hold("sharing", trie, rows, shared))
                await self._copy_ahead(trie, rows, source, shared, movement)
                source = shared
            return await self._copies.write(trie, rows, source, movement)

    def _queue(self, trie: Trie, source: MemoryTier) -> _Queue:
        at = trie.ordinal, source.level
        if at not in self._queues:
            if self._policy == "pinned":
                self._queues[at] = _PinnedBlocks(trie, source.level, self._tier.level)
            else:
                least_uses = 1 if self._policy == "reused" else 0
                clock = self._placement.clock
                owners = partial(self._placement.use.owners, trie)
                self._queues[at] = UnwrittenBlocks(
                    *(trie, source.level, self._tier.level, clock, least_uses), owners=owners
                )
        return self._queues[at]


class _Queue(Protocol):
    async def next(self, count: int) -> Rows: ...

    def begin_again(self) -> None: ...


class _PinnedBlocks:
    """A queue, as `UnwrittenBlocks`, of pinned blocks to write."""

    def __init__(self, trie: Trie, source: int, target: int) -> None:
        self._trie = trie
        self._source = source
        self._target = target
        self._found: Rows = np.empty(0, np.int64)

    async def next(self, count: int) -> Rows:
        if not len(self._found):
            await self._scan()
        rows, self._found = self._found[:count], self._found[count:]
        waiting: Rows = rows[self._trie.unwritten(rows, self._source, self._target) != 0]
        return waiting

    def begin_again(self) -> None:
        self._found = self._found[:0]

    async def _scan(self) -> None:
        trie, pacer = self._trie, Pacer(SCANNED_AT_ONCE)
        found = [np.empty(0, np.int64)]
        for part in slices(trie.rows):
            found.append(part.start + np.flatnonzero(trie.pinned[part]))
            await pacer.worked(part.stop - part.start)
        pinned = np.concatenate(found)
        family = await find_ancestry(trie, pinned[trie.pinned[pinned]])
        family = family[trie.unwritten(family, self._source, self._target) != 0]
        self._found = family[np.argsort(trie.depth[family], kind="stable")]
