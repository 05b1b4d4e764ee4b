"""How engines read blocks: a prefix matched, brought to the CPU tier, and leased there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.pacer import give_way
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import NONE, TIERS, Rows, Trie
from prefixd.cache.moving.beginnings import Beginning, Reader
from prefixd.cache.moving.mover import Mover
from prefixd.cache.namespaces import Namespace
from prefixd.cache.placement.holds import Hold
from prefixd.cache.sessions.sessions import Lease, LeaseTable, Session

NO_OFFSET = np.uint64(2**64 - 1)
_HELD_AT_ONCE = 1 << 16  # blocks that are held and counted in one turn of the event loop: up to 4 ms
BlockTiers = npt.NDArray[np.int8]
"""[blocks]: the tier of each block of a prompt; `NONE` for a block that no tier has."""


@dataclass(slots=True)
class HitCounters:
    """Prompt tokens asked for and found since the start, once a prompt; the rest, asked - found, was not found.

    Found is what was granted to be read: what is cached and has no room where it is read is no hit.
    """

    asked_tokens: int = 0
    hit_tokens: list[int] = field(default_factory=lambda: [0] * TIERS)  # by the tier they were found in

    def ask(self, tokens: int) -> None:
        """Counts prompt tokens that were asked for."""
        self.asked_tokens += tokens

    def find(self, tiers: BlockTiers, block_tokens: int) -> None:
        """Counts blocks that were granted and had been found in these tiers."""
        for tier, blocks in enumerate(np.bincount(tiers, minlength=TIERS)[:TIERS].tolist()):
            self.hit_tokens[tier] += blocks * block_tokens


@dataclass(frozen=True, slots=True)
class Asked:
    """Which blocks of a prompt a caller wants to read, and how they enter the hit rates.

    Attributes:
        first_block: what is before it is of no interest.
        max_blocks: the most blocks; 0: all.
        prefix_blocks: the blocks are read as a slice of a prefix of this length; 0: the prompt goes on behind them.
        ttl_s: see `LeaseTable.ttl`.
        counted: this is the lookup by which the prompt enters the hit rates; what is leased counts as found.
        found: the prompt was counted as asked for, and what is leased counts as found: in these tiers, from the
            prompt's first block on, and behind them where it is. `counted` is not looked at.
    """

    first_block: int = 0
    max_blocks: int = 0
    prefix_blocks: int = 0
    ttl_s: float = 0.0
    counted: bool = True
    found: BlockTiers | None = None

    def end(self, blocks: int) -> int:
        """The block of a prompt of so many behind the last one that is asked for."""
        return min(self.first_block + self.max_blocks, blocks) if self.max_blocks else blocks


Match = Callable[[Namespace, BlockChain, int], Awaitable[Rows]]
"""(namespace, chain, limit): the rows of the longest cached prefix, which counts as use."""


class Leasing:
    """Grants leases.

    Args:
        mover: brings blocks.
        leases: whom a lease belongs to.
        counters: of lookups.
        clock: seconds, monotonic.
        trie_of: the trie of a namespace.
        match: looks prefixes up.
        end_prefetches: lets go of what a tenant's prefetches hold; whether there were any.
    """

    def __init__(
        self,
        mover: Mover,
        leases: LeaseTable,
        counters: HitCounters,
        clock: Callable[[], float],
        trie_of: Callable[[Namespace], Trie],
        match: Match,
        end_prefetches: Callable[[Tenant], Awaitable[bool]],
    ) -> None:
        self._mover = mover
        self._leases = leases
        self._counters = counters
        self._clock = clock
        self._trie_of = trie_of
        self._match = match
        self._end_prefetches = end_prefetches
        self._shared = mover.tiers.shared
        self._holds = mover.placement.holds
        self._uncut: set[Beginning] = set()

    async def acquire(
        self,
        session: Session,
        namespace: Namespace,
        chain: BlockChain,
        asked: Asked | None = None,
        matched: Callable[[Reader], None] | None = None,
    ) -> Lease | None:
        """Leases the cached prefix of a prompt in the CPU tier; None if nothing of it is cached.

        The lease is shorter than the match if the CPU tier has no room for all of it, if the tenant may not hold more,
        or if a block turns out to be damaged: it covers the longest beginning that fits (`beginnings`).

        Args:
            session: the owner of the lease.
            namespace: the prompt's.
            chain: the prompt's blocks.
            asked: which of them to lease; all by default.
            matched: called with the blocks to read before any of them is brought up.

        Raises:
            UnsupportedError: there is no CPU tier.
            ExhaustedError: the tenant may not hold or have anything more in the CPU tier.
        """
        self._mover.tiers.check_shared()
        asked, trie = asked or Asked(), self._trie_of(namespace)
        with self._mover.working():
            self._leases.admit(session)
            ttl_s, identity = self._leases.ttl(asked.ttl_s), self._leases.next_id()
            reader = await self._find(namespace, trie, chain, asked)
            if matched is not None:
                matched(reader)
            tiers = self._tiers_found(session, namespace, chain, reader, asked)
            hold = await self._hold(session.tenant, f"lease {identity}", reader)
            if not len(hold.rows):
                hold.end()
                return None
            lease = Lease(identity, session, hold, self._clock() + ttl_s)
            self._leases.grant(lease)
            if asked.counted or asked.found is not None:
                end = asked.first_block + len(hold.rows)
                self._counters.find(tiers[asked.first_block : end], trie.block_tokens)
            return lease

    async def _find(self, namespace: Namespace, trie: Trie, chain: BlockChain, asked: Asked) -> Reader:
        """Matches the prompt and counts the lookup."""
        first, end = asked.first_block, asked.end(len(chain))
        path = await self._match(namespace, chain, asked.prefix_blocks or end)
        if asked.counted and asked.found is None:
            self._counters.ask(max(end - first, 0) * trie.block_tokens)
        if trie.has_rules and len(path) < asked.prefix_blocks:  # of a shorter prefix, other bytes are needed
            end = first
        return Reader(trie, path, first, min(end, len(path)), slice_only=asked.prefix_blocks > 0)

    def _tiers_found(
        self, session: Session, namespace: Namespace, chain: BlockChain, reader: Reader, asked: Asked
    ) -> BlockTiers:
        if asked.found is not None:
            return _overlaid(reader.trie.distances(reader.path), asked.found)
        if asked.counted:
            return self.tiers_at_arrival(session, namespace, reader.trie, chain, reader.path)
        return reader.trie.distances(reader.path)

    def tiers_at_arrival(
        self, session: Session, namespace: Namespace, trie: Trie, chain: BlockChain, path: Rows
    ) -> BlockTiers:
        """Where the blocks of a path lay when the session gave a hint for the prompt, else where they are."""
        tiers = trie.distances(path)
        if not session.arrivals.noted:
            return tiers
        return _overlaid(tiers, session.arrivals.take(namespace, chain, self._clock()))

    async def _hold(self, tenant: Tenant, owner: str, reader: Reader) -> Hold:
        """A counted hold of the longest beginning of what is read that fits, with its bytes in the CPU tier.

        Raises:
            ExhaustedError: the tenant may hold nothing more in the CPU tier, or have nothing more there.
        """
        asked = self._holdable(tenant, reader)
        trie, rows, wanted = asked.trie, asked.rows, asked.wanted if asked.trie.has_rules else None
        if len(rows) <= _HELD_AT_ONCE and not trie.lacking(rows, self._shared.level, wanted).any():
            return self._holds.hold(owner, trie, rows, self._shared, wanted, counted=self._shared)
        beginning = Beginning(self._mover, owner, asked, self._uncut)
        await beginning.bring(give_way=partial(self._end_prefetches, tenant))
        try:
            if len(rows) > _HELD_AT_ONCE:
                await give_way()
            # Others were granted leases meanwhile, and a shorter prefix may need other bytes.
            while (shorter := self._holdable(tenant, beginning.reader)) != beginning.reader:
                beginning.cut(shorter)
                await beginning.bring()
            if len(rows) and not len(shorter.rows):
                nbytes = self._mover.use.footprint(self._shared, trie.part_bytes)
                self._mover.use.refuse_at_most(tenant, self._shared, nbytes, "release leases")
        except BaseException:
            beginning.hold.end()
            raise
        return beginning.keep()

    def _holdable(self, tenant: Tenant, reader: Reader) -> Reader:
        """The longest beginning of what is read of which a tenant may hold in the CPU tier what is needed.

        Common blocks in it are held on the account of all tenants.

        Raises:
            ExhaustedError: it may not hold even the first block.
        """
        shared, use, trie = self._shared, self._mover.use, reader.trie
        if use.room_to_hold(tenant, shared) is None:
            return reader
        while len(reader.rows):
            fresh = use.held.fresh_bytes(trie, shared, reader.rows, reader.wanted)
            fits = len(fresh)
            for owner, mine in use.places_by_owner(trie, reader.rows):
                over = np.cumsum(fresh[mine]) > (use.room_to_hold(owner, shared) or 0)
                fits = min([fits, *np.arange(len(fresh))[mine][over][:1].tolist()])
            if fits == len(fresh):
                return reader
            reader = reader.cut(reader.first_block + fits)
            if not len(reader.rows):
                use.refuse_to_hold(tenant, shared, "release leases and reservations")
        return reader

    def offsets(self, lease: Lease, parts: Sequence[int], blocks: slice = slice(None)) -> npt.NDArray[np.uint64]:
        """[blocks, parts]: arena offsets of leased parts; `NO_OFFSET` for one that its group's rule does not need."""
        hold, chosen = lease.hold, list(parts)
        trie = hold.trie
        offsets: npt.NDArray[np.uint64] = trie.slots[hold.rows[blocks], self._shared.level][:, chosen].astype(np.uint64)
        if hold.wanted is not None:
            offsets[(hold.wanted[blocks, None] & trie.part_mask[chosen]) == 0] = NO_OFFSET
        return offsets


def _overlaid(tiers: BlockTiers, before: BlockTiers) -> BlockTiers:
    """Tiers of blocks; of the first ones as they were before, where any tier had them then."""
    before = before[: len(tiers)]
    np.copyto(tiers[: len(before)], before, where=before != NONE)
    return tiers
