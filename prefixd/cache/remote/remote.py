"""Connects the parts of the remote tier."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from prefixd.cache.coding.namespace_codings import EXACT, NamespaceCodings, TierCodec
from prefixd.cache.disk.checksums import Checksums
from prefixd.cache.index.trie import Trie
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.cache.placement.placement import Placement
from prefixd.cache.remote.copies import RemoteCopies
from prefixd.cache.remote.digests import Digests
from prefixd.cache.remote.health import RemoteHealth
from prefixd.cache.remote.known_blocks import KnownBlocks
from prefixd.cache.remote.lookups import RemoteLookups
from prefixd.cache.remote.sharing import CopyAhead, SharePolicy, Sharing
from prefixd_swap.tiers import RemoteTier

_RECHECKED = 10
"""The mark that the store has a local block lasts this many times `known_s`."""


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Settings of a shared store.

    Attributes:
        share: which blocks to write to it.
        lookup_s: the most that a prompt waits for a lookup.
        absent_s: how long a missing block is not asked for again.
        known_s: how long a block that only the store has is kept in the trie without use.
        known_blocks: the most such blocks.
        codec: how blocks are stored there.
    """

    share: SharePolicy = "all"
    lookup_s: float = 0.05
    absent_s: float = 1.0
    known_s: float = 60.0
    known_blocks: int = 1 << 18
    codec: TierCodec = EXACT


class Remote:
    """The parts of the remote tier, connected.

    Args:
        tier: the store's tier; this owns it.
        placement: records where blocks are.
        tries: all tries, by ordinal.
        namespaces: all namespaces.
        clock: seconds, monotonic.
        checksums: computes checksums of blocks in memory.
        copy_ahead: see `Sharing`.
        options: the store's settings.
    """

    def __init__(
        self,
        tier: RemoteTier,
        placement: Placement,
        tries: list[Trie],
        namespaces: NamespaceRegistry,
        clock: Callable[[], float],
        checksums: Checksums,
        copy_ahead: CopyAhead,
        options: RemoteOptions,
    ) -> None:
        self.tier = tier
        recheck_s = _RECHECKED * options.known_s
        if tier.ttl_s:  # forget it before the store deletes it
            recheck_s = min(recheck_s, tier.ttl_s / 2)
        self.known = KnownBlocks(
            tier, placement, tries, clock, known_s=options.known_s, recheck_s=recheck_s, limit=options.known_blocks
        )
        self.health = RemoteHealth(tier, placement, tries, self.known.forget_all)
        digests = Digests(tier, namespaces)
        codings = NamespaceCodings(namespaces, placement.use.tenants, options.codec)
        self.copies = RemoteCopies(tier, placement, digests, codings, self.health, checksums)
        tier.on_failure = self.health.failed
        self.lookups = RemoteLookups(
            *(tier, placement, digests, codings, self.copies, self.known, self.health, clock),
            *(options.lookup_s, options.absent_s),
        )
        self.sharing = Sharing(tier, placement, tries, self.copies, copy_ahead, options.share)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> list[asyncio.Task[None]]:
        """Starts the background tasks, which end with `stop`, or by a defect."""
        self._tasks = [
            asyncio.create_task(self.health.watch(), name="remote-probe"),
            asyncio.create_task(self.known.watch(), name="remote-known"),
            asyncio.create_task(self.sharing.run(), name="sharing"),
        ]
        return self._tasks

    async def stop(self) -> None:
        """Ends the background tasks after the batch under way. The store gets no more calls."""
        self.sharing.stop()
        self.tier.readable = self.tier.writable = False
        for task in self._tasks[:2]:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.lookups.close()
