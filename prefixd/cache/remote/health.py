"""A circuit breaker for a shared store: the first failure takes it out of service, a successful probe puts it back.

Out of service it is only probed: blocks that only it has are not matched, nothing is written, and requests continue
without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from prefixd.cache.index.trie import Trie
from prefixd.cache.placement.placement import Placement
from prefixd.cache.troubles import tier_part
from prefixd_swap import StorageError
from prefixd_swap.tiers import RemoteTier

FIRST_PROBE_S = 0.25
LONGEST_PROBE_S = 2.0
FULL_S = 5.0


class RemoteHealth:
    """Decides whether the store is read and written.

    Args:
        tier: the store's tier.
        placement: records where blocks are.
        tries: all tries, by ordinal.
        forget: forgets the store's blocks: an outage may have lost them.
    """

    def __init__(
        self, tier: RemoteTier, placement: Placement, tries: list[Trie], forget: Callable[[], Awaitable[None]]
    ) -> None:
        self._tier = tier
        self._placement = placement
        self._tries = tries
        self._forget = forget
        self._failed = asyncio.Event()
        self._out = asyncio.Event()
        self.failures = 0
        """How often the store was taken out of service since the start."""

    def failed(self, error: StorageError, writing: bool = False) -> None:
        """Takes the store out of service until a probe succeeds; after a failed write, stops only writing.

        A store that is down fails the next lookup, too. One that refuses writes (full, read-only, no permission) is
        still read, and a ping would not tell when it accepts them again.
        """
        tier, troubles = self._tier, self._placement.tiers.troubles
        tier.writable = False
        if not writing and tier.readable:
            tier.readable = False
            self.failures += 1
            self._out.set()
            self._offer(False)
        troubles.begin(tier_part(tier), str(error))
        self._failed.set()

    async def watch(self) -> None:
        """Probes the store at once, so that wrong settings show, and whenever it has failed; runs for ever."""
        wait_s = FIRST_PROBE_S
        try:
            await self._tier.try_out()
        except StorageError as error:
            self.failed(error)
        while True:
            await self._failed.wait()
            if self._tier.readable:
                await self._try_writing()
            else:
                await asyncio.sleep(wait_s)
                wait_s = FIRST_PROBE_S if await self._probe() else min(2 * wait_s, LONGEST_PROBE_S)

    async def _try_writing(self) -> None:
        """Tries writing again after a while. The warning ends with a write, or if none failed for as long again.

        A store that does not answer the ping now, or a lookup during the pause, is down. One that went down and came
        back in between is treated as one that refuses writes.
        """
        try:
            await self._tier.try_out()
        except StorageError as error:
            self.failed(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(FULL_S):  # wait_for may lose the cancellation of `watch` (Python 3.11)
                await self._out.wait()
        if not self._tier.readable:
            return
        self._failed.clear()
        self._tier.writable = True
        self._placement.epoch += 1
        try:
            async with asyncio.timeout(FULL_S):
                await self._failed.wait()
        except TimeoutError:
            self.wrote()

    def wrote(self) -> None:
        """Ends the warning after a successful write."""
        if self._tier.readable and not self._failed.is_set():
            self._placement.tiers.troubles.end(tier_part(self._tier))

    async def _probe(self) -> bool:
        try:
            await self._tier.try_out()
        except StorageError as error:
            self._placement.tiers.troubles.begin(tier_part(self._tier), str(error))
            return False
        await self._forget()
        self._well()
        return True

    def _well(self) -> None:
        tier = self._tier
        self._failed.clear()
        tier.writable = True
        if not tier.readable:
            tier.readable = True
            self._out.clear()
            self._offer(True)
        self._placement.tiers.troubles.end(tier_part(tier))
        self._placement.changed.set()

    def _offer(self, readable: bool) -> None:
        for trie in self._tries:
            trie.offer(self._tier.level, readable)
        self._placement.epoch += 1
