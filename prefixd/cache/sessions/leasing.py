"""Leases blocks to engines for reading: matches a prefix, brings it to the CPU tier, and holds it there."""

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
from prefixd.cache.prompt_listeners import Lookup, PromptListeners
from prefixd.cache.sessions.lease_table import LeaseTable
from prefixd.cache.sessions.sessions import Lease, Session
from prefixd.observability.measurements import Traffic

NO_OFFSET = np.uint64(2**64 - 1)
_HELD_AT_ONCE = 1 << 16  # blocks to hold and count in one turn of the event loop: up to 4 ms
BlockTiers = npt.NDArray[np.int8]
"""[blocks]: the tier of each block of a prompt; `NONE` for a block that no tier has."""
_NOWHERE: BlockTiers = np.empty(0, np.int8)


def tokens_by_tier(tiers: BlockTiers, block_tokens: int) -> list[int]:
    """[tiers]: the tokens of blocks in each tier."""
    return [blocks * block_tokens for blocks in np.bincount(tiers, minlength=TIERS)[:TIERS].tolist()]


@dataclass(slots=True)
class HitCounters:
    """Prompt tokens asked for, and found, since the start; each prompt counts once.

    Tokens are found if they were leased. Cached blocks without room where they are read are no hit. `traffic` has the
    same counts by tenant and model.
    """

    traffic: Traffic = field(default_factory=Traffic)
    asked_tokens: int = 0
    hit_tokens: list[int] = field(default_factory=lambda: [0] * TIERS)  # by the tier they were found in

    def ask(self, who: tuple[str, str], tokens: int) -> None:
        """Counts prompt tokens as asked for. `who`: the tenant's name, and the model's or the namespace's."""
        self.asked_tokens += tokens
        self.traffic.ask(who, tokens)

    def find(self, who: tuple[str, str], tiers: BlockTiers, block_tokens: int) -> list[int]:
        """Counts blocks as found in these tiers; returns the tokens by tier."""
        found = tokens_by_tier(tiers, block_tokens)
        for tier, tokens in enumerate(found):
            self.hit_tokens[tier] += tokens
        self.traffic.find(who, found)
        return found


@dataclass(frozen=True, slots=True)
class Asked:
    """Which blocks of a prompt a caller wants to read, and how they count in the hit rates.

    Attributes:
        first_block: the first block to read.
        max_blocks: the most blocks; 0: all.
        prefix_blocks: the blocks are read as a slice of a prefix of this length; 0: the prompt continues behind them.
        ttl_s: lifetime of the lease; 0: the default.
        counted: count the prompt as asked for, and the leased blocks as found.
        found: [blocks] the prompt was counted as asked for before, and its first blocks were found in these tiers.
            Count the leased blocks as found there, and later ones in their current tier. Overrides `counted`.
    """

    first_block: int = 0
    max_blocks: int = 0
    prefix_blocks: int = 0
    ttl_s: float = 0.0
    counted: bool = True
    found: BlockTiers | None = None

    def end(self, blocks: int) -> int:
        """The end of the range to read in a prompt of `blocks` blocks."""
        return min(self.first_block + self.max_blocks, blocks) if self.max_blocks else blocks


Match = Callable[[Namespace, BlockChain, int], Awaitable[Rows]]
"""(namespace, chain, limit): the rows of the longest cached prefix, which counts as use."""


class Leasing:
    """Grants leases.

    Args:
        mover: brings blocks.
        leases: the sessions and their grants.
        counters: hit rates.
        prompts: told of each prompt that is counted as asked for.
        clock: seconds, monotonic.
        trie_of: the trie of a namespace.
        match: finds the longest cached prefix.
        end_prefetches: ends a tenant's prefetches; returns whether there were any.
    """

    def __init__(
        self,
        mover: Mover,
        leases: LeaseTable,
        counters: HitCounters,
        prompts: PromptListeners,
        clock: Callable[[], float],
        trie_of: Callable[[Namespace], Trie],
        match: Match,
        end_prefetches: Callable[[Tenant], Awaitable[bool]],
    ) -> None:
        self._mover = mover
        self._leases = leases
        self._counters = counters
        self._prompts = prompts
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
        matched: Callable[[Reader, BlockTiers], None] | None = None,
    ) -> Lease | None:
        """Leases the cached prefix of a prompt in the CPU tier; None if nothing of it is cached.

        The lease is shorter than the match if the CPU tier has no room for all of it, if the tenant may not hold more,
        or if a block turns out to be damaged: it covers the longest beginning that fits (`beginnings`).

        Args:
            session: the owner of the lease.
            namespace: the prompt's.
            chain: the prompt's blocks.
            asked: which of them to lease; all by default.
            matched: called with the blocks to read before any of them is brought up, and with the tiers of the
                prefix when the prompt arrived.

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
            tiers = self._tiers_found(session, namespace, chain, reader, asked)
            if matched is not None:
                matched(reader, tiers)
            hold = await self._hold(session.tenant, f"lease {identity}", reader)
            if not len(hold.rows):
                hold.end()
                return None
            now_s = self._clock()
            lease = Lease(identity, session, hold, now_s + ttl_s, now_s)
            self._leases.grant(lease)
            if asked.counted or asked.found is not None:
                end = asked.first_block + len(hold.rows)
                self._counters.find(namespace.spec.who, tiers[asked.first_block : end], trie.block_tokens)
                if not asked.first_block:  # a long prompt is leased in slices
                    trie.hits[hold.rows[-1]] += 1
            return lease

    async def _find(self, namespace: Namespace, trie: Trie, chain: BlockChain, asked: Asked) -> Reader:
        """Matches the prompt and counts the lookup."""
        first, end = asked.first_block, asked.end(len(chain))
        path = await self._match(namespace, chain, asked.prefix_blocks or end)
        if asked.counted and asked.found is None:
            self._counters.ask(namespace.spec.who, max(end - first, 0) * trie.block_tokens)
            lookup = Lookup(max(end - first, 0) * trie.block_tokens, end, min(len(path), end), first)
            self._prompts.tell_looked_up(namespace, chain, lookup)
        if trie.has_rules and len(path) < asked.prefix_blocks:  # a shorter prefix needs other bytes
            end = first
        return Reader(trie, path, first, min(end, len(path)), slice_only=asked.prefix_blocks > 0)

    def _tiers_found(
        self, session: Session, namespace: Namespace, chain: BlockChain, reader: Reader, asked: Asked
    ) -> BlockTiers:
        if asked.found is not None:
            self._hinted(session, namespace, chain)  # counted before, but it is needed now
            return _overlaid(reader.trie.distances(reader.path), asked.found)
        if asked.counted:
            return self.tiers_at_arrival(session, namespace, reader.trie, chain, reader.path)
        return reader.trie.distances(reader.path)

    def tiers_at_arrival(
        self, session: Session, namespace: Namespace, trie: Trie, chain: BlockChain, path: Rows
    ) -> BlockTiers:
        """The tiers of the blocks of a path at the session's hint for the prompt, or else their current tiers."""
        return _overlaid(trie.distances(path), self._hinted(session, namespace, chain))

    def _hinted(self, session: Session, namespace: Namespace, chain: BlockChain) -> BlockTiers:
        """The tiers at the session's hint for a prompt; measures how long before its need it was brought up."""
        if not session.arrivals.noted:
            return _NOWHERE
        return session.arrivals.take(
            *(namespace, chain, self._clock()),
            lambda seconds: self._mover.timings.prefetch_lead_s.observe(seconds, self._shared.name),
        )

    async def _hold(self, tenant: Tenant, owner: str, reader: Reader) -> Hold:
        """Holds the longest beginning of the blocks to read that fits, with its bytes in the CPU tier; counted.

        Raises:
            ExhaustedError: the tenant may not hold or have anything more in the CPU tier.
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
            # Others may have been granted leases meanwhile, and a shorter prefix may need other bytes.
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
        """The longest beginning of the blocks to read whose needed bytes a tenant may hold in the CPU tier.

        Common blocks count for the common tenant.

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
        """[blocks, parts]: arena offsets of leased parts; `NO_OFFSET` for parts that the prefix does not need."""
        hold, chosen = lease.hold, list(parts)
        trie = hold.trie
        offsets: npt.NDArray[np.uint64] = trie.slots[hold.rows[blocks], self._shared.level][:, chosen].astype(np.uint64)
        if hold.wanted is not None:
            offsets[(hold.wanted[blocks, None] & trie.part_mask[chosen]) == 0] = NO_OFFSET
        return offsets


def _overlaid(tiers: BlockTiers, before: BlockTiers) -> BlockTiers:
    """`tiers`, overwritten by those in `before` that are not `NONE`."""
    before = before[: len(tiers)]
    np.copyto(tiers[: len(before)], before, where=before != NONE)
    return tiers
