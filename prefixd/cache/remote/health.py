"""A breaker in front of a shared store: it is taken out of service by its first failure, and comes back by itself.

While it is out nobody asks it anything: blocks that only it has are not matched, nothing is written, and requests go on
as if there was no such tier. A probe tries it again and again.
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
    """Whether the store is asked, read and written.

    Args:
        tier: the store's.
        placement: what is where.
        tries: all tries, by ordinal.
        forget: forgets what the store has: after an outage nobody knows.
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
        """Times that the store was taken out of service since the start."""

    def failed(self, error: StorageError, writing: bool = False) -> None:
        """A call failed: until a probe succeeds the store is out of service; after a write it is not written to.

        A store that is away fails the next question, too. One that refuses writes (full, read-only, no right to) is
        still read, and a ping would not tell when it takes them again.
        """
        tier, troubles = self._tier, self._placement.tiers.troubles
        tier.takes = False
        if not writing and tier.gives:
            tier.gives = False
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
            if self._tier.gives:
                await self._try_writing()
            else:
                await asyncio.sleep(wait_s)
                wait_s = FIRST_PROBE_S if await self._probe() else min(2 * wait_s, LONGEST_PROBE_S)

    async def _try_writing(self) -> None:
        """Has a store that refused a write written to again after a while. The trouble ends with a write, or when
        nothing was written for as long again.

        One that does not answer when it is asked now, or when a prompt asks during the pause, is away. One that was
        away and is back by now is not told from one that refuses.
        """
        try:
            await self._tier.try_out()
        except StorageError as error:
            self.failed(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(FULL_S):  # not wait_for, which may lose that `watch` is cancelled (Python 3.11)
                await self._out.wait()
        if not self._tier.gives:
            return
        self._failed.clear()
        self._tier.takes = True
        self._placement.epoch += 1
        try:
            async with asyncio.timeout(FULL_S):
                await self._failed.wait()
        except TimeoutError:
            self.wrote()

    def wrote(self) -> None:
        """A write succeeded: the store refuses nothing any more."""
        if self._tier.gives and not self._failed.is_set():
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
        tier.takes = True
        if not tier.gives:
            tier.gives = True
            self._out.clear()
            self._offer(True)
        self._placement.tiers.troubles.end(tier_part(tier))
        self._placement.changed.set()

    def _offer(self, gives: bool) -> None:
        for trie in self._tries:
            trie.offer(self._tier.level, gives)
        self._placement.epoch += 1
