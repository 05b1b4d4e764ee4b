"""The cache, as engines and the daemon's own worker use it.

Engines in other processes read and fill blocks in the CPU tier's shared arena (`acquire`, `reserve`, `commit`). The
worker computes blocks in the GPU tier (`record`). Both kinds are in the same trie.

    names      registration, tries, namespaces, namespace_room
    engines    sessions/: leasing (read), reservations (fill), claims, durability, pins
    worker     placement/recording
    moving     moving/, disk/, remote/; background/ ahead of need
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from prefixd.base import heap
from prefixd.base.errors import InvalidArgumentError, NotFoundError
from prefixd.base.long_work.steps import do_at_once
from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache.background.common_blocks import CommonBlocks
from prefixd.cache.background.prefetches import Prefetches
from prefixd.cache.background.refused_blocks import RefusedBlocks
from prefixd.cache.background.scrubber import Scrubber
from prefixd.cache.background.write_back import WriteBack
from prefixd.cache.disk.restore import known_namespaces, remove_refused, remove_unused, restore
from prefixd.cache.index.keys.block_keys import BlockChain, Digest, xxh3_digest
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.moving.mover import Mover
from prefixd.cache.namespace_room import NamespaceRoom
from prefixd.cache.namespaces import Namespace, NamespaceRegistry
from prefixd.cache.options import CacheOptions
from prefixd.cache.placement.paths import find_path
from prefixd.cache.placement.recording import Recording
from prefixd.cache.placement.retention import Retained, Retention, RetentionGrant
from prefixd.cache.prompt_listeners import Lookup, PromptListeners
from prefixd.cache.registration import Registration
from prefixd.cache.sessions.claims import ComputeClaims
from prefixd.cache.sessions.durability import Durability
from prefixd.cache.sessions.lease_table import LeaseTable
from prefixd.cache.sessions.leasing import HitCounters, Leasing
from prefixd.cache.sessions.pins import Pins, restore_pins
from prefixd.cache.sessions.reservations import Reservations
from prefixd.cache.sessions.sessions import End, Grant, Lease, Process, Session
from prefixd.cache.tiers import Tiers
from prefixd.cache.tries import Tries
from prefixd.observability.measurements import Measurements
from prefixd_swap import CopyEngine, EvictionPolicy, UseHistory
from prefixd_swap.eviction.use_history import REMEMBERED

Claim = tuple[Trie, Rows, list[int]]
MAX_BLOCKS = 1 << 20
"""The most blocks of a prompt in one call. With 4 tokens a block, these are as many tokens as fit in a message."""


class TieredCache:
    """The tries, the tiers and the leases of one daemon. Only the event loop uses it.

    Args:
        tiers: the memory.
        engine: copies between memory spans.
        policy: eviction policy.
        clock: seconds, monotonic.
        options: settings.
        tenants: the owners of sessions and namespaces.
        digest: block key function; replaced in tests.
    """

    def __init__(
        self,
        tiers: Tiers,
        engine: CopyEngine,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        options: CacheOptions | None = None,
        *,
        tenants: Tenants | None = None,
        digest: Digest = xxh3_digest,
    ) -> None:
        options = options or CacheOptions()
        self.tiers = tiers
        self.clock = clock
        self.policy = policy
        self.tenants = tenants or Tenants()
        self.measurements = Measurements()
        self.counters = HitCounters(self.measurements.traffic)
        self.prompts = PromptListeners()
        self.claims: list[Callable[[], Iterator[Claim]]] = []
        """Return rows in the GPU tier held without a `Hold`, and frames in flight; for `check_integrity`."""
        self._digest = digest
        # Without another tier, the GPU tier comes with the worker.
        policy.last_tier = max((tier.level for tier in tiers.own), default=tiers.compute.level)
        uses = UseHistory(policy, REMEMBERED if policy.remembers or options.admit_uses else 0)

        self.namespaces = NamespaceRegistry(with_common=options.share_after > 1)
        # The time to compute blocks of a new geometry is not known yet.
        self._tries = Tries(tiers, lambda trie: policy.observe_compute_time(trie, lambda tokens: None))
        self.tries = self._tries.all
        self.mover = Mover(
            *(tiers, self.tries, self.namespaces, engine, policy, clock, uses),
            *(options.admit_uses, options.remote, self.tenants),
            disk_codec=options.disk_codec,
            timings=self.measurements.timings,
        )
        self.placement = self.mover.placement
        self.holds = self.placement.holds

        self._prefetches = Prefetches(self.mover, options.prefetch_bytes)
        self.leases = LeaseTable(
            self.mover.spawn, self._session_ended, options, self.tenants, ended=self._measure_grant
        )
        self.computing = ComputeClaims(self.leases, clock, self._cached_blocks, lambda: self.tenants.calling)
        self.namespace_room = NamespaceRoom(
            *(self.namespaces, self.tenants, self.leases, self.mover, self._tries, tiers.troubles, clock),
            options.namespace_bytes,
        )
        self.registration = Registration(
            *(self.namespaces, self._tries, self.tenants, self.leases, self.mover, self.namespace_room),
            share_at_once=options.share_after == 1,
        )
        self.register = self.registration.register
        self.open_namespace = self.registration.open_namespace
        self.unlisted = self.registration.unlisted
        self.observe, self.unobserve = self._tries.observe, self._tries.unobserve
        self.retained = Retained(tiers, self.tries, self.registration.tenant_at, clock, lambda: self.tenants.calling)
        self._tries.on_retained = self.retained.count

        queue_bytes = options.write_queue_bytes
        if queue_bytes is None and tiers.exists(tiers.shared):
            queue_bytes = tiers.shared.capacity_bytes // 2
        self.write_back = WriteBack(self.mover, enabled=options.write_back, limit_bytes=queue_bytes)
        self.scrubber = Scrubber(
            self.mover, clock, bytes_per_s=options.scrub_bytes_per_s, every_s=options.scrub_every_s
        )
        self.refused = RefusedBlocks(self.mover)
        self.common: CommonBlocks | None = None
        """Makes blocks common, if `share_after` is above 1."""
        if options.share_after > 1:
            self.common = CommonBlocks(self.mover, self.namespaces, self._chain, clock, options.share_after)

        stored = None if self.common is None else self.common.stored

        self._durability = Durability(self.mover)
        self._leasing = Leasing(
            *(self.mover, self.leases, self.counters, self.prompts, clock),
            *(self.trie, self.match, self._prefetches.end_of),
        )
        self._reservations = Reservations(
            *(self.mover, self._durability, self.leases, self.retained, self.trie, options.reserved_bytes),
            *(self.write_back.admit, stored, self.measurements.traffic, self.computing, self.prompts.tell_stored),
        )
        self.warm = self._prefetches.bring
        self.acquire, self.offsets = self._leasing.acquire, self._leasing.offsets
        self.reserve, self.commit = self._reservations.reserve, self._reservations.commit
        self.quarantine = self._reservations.quarantine
        self.pins = Pins(self.mover, self._durability)
        recording = Recording(self.placement, self.trie, stored)
        self.record, self.record_state = recording.record, recording.record_state

    # -- start and end ------------------------------------------------------------------------------------------

    def restore(self) -> int:
        """Reads the disk tier's index into the empty tries; returns the number of restored blocks.

        Raises:
            StorageError: the index cannot be read.
        """
        store = self.tiers.durable
        if store is None:
            return 0
        records, stored = store.load(), store.namespaces()
        known = known_namespaces(stored, records.namespaces, self.namespaces)
        for namespace in known.values():
            self.registration.add(namespace)
        restored = restore(records, known, self.trie, self.placement, store.level, self.mover.codings.most_error)
        restore_pins(store, known, self.trie)
        do_at_once(self.mover.use.count_pinned(self.tries))
        remove_refused(store, restored)
        self.mover.disk.dropped_altered = restored.altered
        used = {identity for identity, namespace in known.items() if self._tries.has_blocks(namespace)}
        remove_unused(store, stored.keys() - used)
        metadata = self.mover.disk.metadata
        metadata.saved.update(used)
        store.reseal_namespaces(metadata.encryption())
        self.mover.use.recount(self.tries)
        heap.give_back()
        return restored.blocks

    def start(self) -> list[asyncio.Task[None]]:
        """Starts the background tasks, which end with `close` or by a defect; returns them to be watched."""
        tasks = [self.write_back.start(), self.scrubber.start()]
        if self.common is not None:
            tasks.append(self.common.start())
        if self.tiers.durable is not None:
            tasks.append(self.mover.start_probing())
        if self.mover.remote is not None:
            tasks += self.mover.remote.start()
        return [task for task in tasks if task is not None]

    async def close(self) -> None:
        """Ends all sessions and waits for the copies under way."""
        for session in list(self.leases.sessions.values()):
            self.leases.close(session)
        await self.refused.stop()
        await self.scrubber.stop()
        await self.write_back.stop()
        if self.common is not None:
            await self.common.stop()
        if self.mover.remote is not None:
            await self.mover.remote.stop()
        await self.mover.close()

    # -- names --------------------------------------------------------------------------------------------------

    def open_in(self, session: Session, identity: bytes) -> Namespace:
        """Marks a namespace that is open to a session as used and returns it. Raises as `Session.namespace`."""
        namespace = session.namespace(identity)
        self.namespaces.touch(namespace)
        return namespace

    def trie(self, namespace: Namespace) -> Trie:
        """The trie that has the namespace's blocks."""
        return self._tries.by_namespace[namespace.ordinal]

    # -- finding ------------------------------------------------------------------------------------------------

    def chain(self, namespace: Namespace, token_ids: bytes) -> BlockChain:
        """The blocks of a prompt; InvalidArgumentError for an empty prompt, an incomplete token, or too many blocks."""
        if not token_ids:
            raise InvalidArgumentError("token_ids is empty; send at least one token")
        if len(token_ids) % 4:
            raise InvalidArgumentError(
                f"token_ids has {len(token_ids)} bytes, not a multiple of 4; send little-endian uint32"
            )
        chain = self._chain(namespace, token_ids)
        if len(chain) > MAX_BLOCKS:
            raise InvalidArgumentError(
                f"token_ids has {len(chain)} blocks of {chain.block_tokens} tokens; a call takes {MAX_BLOCKS} at most: "
                "send fewer tokens, or register the namespace with more tokens a block"
            )
        return chain

    async def match(self, namespace: Namespace, chain: BlockChain, limit: int | None = None) -> Rows:
        """The rows of the longest cached prefix when this returns; counts as use. Asks a shared store first."""
        trie, begun_s = self.trie(namespace), self.clock()
        if self.mover.remote is not None:
            await self.mover.remote.lookups.look_up(trie, namespace, chain, limit)
        path = trie.usable(await find_path(trie, namespace, chain, limit))
        self.placement.touch(trie, path)
        self.measurements.timings.lookup_s.observe(self.clock() - begun_s, *namespace.spec.who)
        return path

    def count_lookup(self, session: Session, namespace: Namespace, chain: BlockChain, rows: Rows) -> None:
        """Counts a session's lookup of one prompt, and `rows` as found.

        They count by the tiers that they were in when the session gave a hint for the prompt (`prefetch`), or else by
        the tiers that they are in.
        """
        trie = self.trie(namespace)
        self.counters.ask(namespace.spec.who, len(chain) * trie.block_tokens)
        self.prompts.tell_looked_up(namespace, chain, Lookup(len(chain) * trie.block_tokens, len(chain), len(rows)))
        tiers = self._leasing.tiers_at_arrival(session, namespace, trie, chain, rows)
        self.counters.find(namespace.spec.who, tiers, trie.block_tokens)

    # -- engines' side --------------------------------------------------------------------------------------------

    async def retain(self, namespace: Namespace, chain: BlockChain, retention: Sequence[Retention]) -> int:
        """Gives the cached blocks of a prompt priorities; returns how many have one other than 0 afterwards.

        An empty `retention` removes the priorities of all of them.

        Raises:
            InvalidArgumentError: a range, a priority or a time is invalid.
            ExhaustedError: it exceeds the tenant's quota; nothing is changed.
        """
        trie = self.trie(namespace)
        with self.mover.working():
            path = trie.usable(await find_path(trie, namespace, chain))
            with self.holds.hold("retain", trie, path):
                with await self.retained.grant(namespace, trie, retention or [Retention()], path) as granted:
                    await granted.apply_all(path)
                return int(np.count_nonzero(trie.priorities(path, self.clock())))

    async def persist(self, namespace: Namespace, chain: BlockChain) -> int:
        """Writes the cached prefix of `chain` to disk; returns its number of blocks, once they are durable.

        Raises:
            PreconditionError: there is no disk tier.
            ExhaustedError: the disk tier has no room, for this tenant or for all, or is out of service.
        """
        trie = self.trie(namespace)
        with self.mover.working():
            path = trie.usable(await find_path(trie, namespace, chain))
            return await self._durability.persist(trie, path)

    def release(self, session: Session, grant_id: str) -> None:
        """Ends a lease or a reservation.

        Raises:
            NotFoundError: it has ended already. The slots of an expired reservation leave quarantine all the same: this
                call says that its holder no longer writes.
        """
        try:
            self.leases.release(session, grant_id)
        except NotFoundError:
            self.quarantine.acknowledge(grant_id, session.processes)
            raise

    def process_ended(self, process: Process) -> None:
        """Handles the end of a client's process, which can no longer write through its mapping of the arena.

        Ends its sessions, unless another process has mapped the arena for them. A stream of such a session may be open
        still, in a child that the process forked.
        """
        process.alive = False
        for session in list(self.leases.sessions.values()):
            if process in session.processes:
                session.processes.discard(process)
                if not session.processes:
                    self.leases.close(session)
        self.quarantine.process_ended(process)

    async def prefetch(self, session: Session, namespace: Namespace, chain: BlockChain) -> int:
        """Starts bringing the cached prefix to the shared tier, until the session ends.

        Returns how many blocks are being brought: the first ones, up to the tenant's limit.

        Raises:
            SessionEndedError: the session ended during the match.
        """
        path = await self.match(namespace, chain)
        self.leases.session(session.id)  # it may have ended meanwhile
        trie = self.trie(namespace)

        def brought() -> None:
            session.arrivals.brought(namespace, chain.key(len(path) - 1), self.clock())

        blocks = self._prefetches.begin(session, trie, path, brought)
        if blocks:  # no block has been moved yet
            session.arrivals.note(namespace, chain, trie.distances(path), self.clock())
        return blocks

    # -- the worker's side ----------------------------------------------------------------------------------------

    async def grant_retention(
        self, namespace: Namespace, chain: BlockChain, blocks: int, groups: int, retention: Sequence[Retention]
    ) -> RetentionGrant:
        """Grants the retention of the first blocks of a prompt before they are computed. The caller ends the grant.

        Args:
            namespace: the prompt's.
            chain: the prompt's blocks.
            blocks: how many of them will be stored.
            groups: the KV groups of which each will have bytes.
            retention: ranges of the prompt; `RetentionGrant.refused` tells if they exceed the tenant's quota.
        """
        trie = self.trie(namespace)
        with self.mover.working():
            path = trie.usable(await find_path(trie, namespace, chain, blocks))
            more = blocks - len(path)
            with self.holds.hold("retain", trie, path):
                return await self.retained.grant(namespace, trie, retention, path, more, groups, optional=True)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _measure_grant(self, grant: Grant, how: End) -> None:
        """Counts the life of a lease, or the time from a reservation to its commit."""
        timings, lasted_s = self.measurements.timings, self.clock() - grant.granted_s
        if isinstance(grant, Lease):
            timings.lease_s.observe(lasted_s, grant.session.tenant.name, how.name.lower())
        elif how is End.COMMITTED:
            timings.save_s.observe(lasted_s, "fill")

    def _session_ended(self, session: Session) -> None:
        self._prefetches.end(session)
        self.computing.end_waits(session)

    async def _cached_blocks(self, namespace: Namespace, chain: BlockChain) -> int:
        return len(await self.match(namespace, chain))

    def _chain(self, namespace: Namespace, token_ids: bytes) -> BlockChain:
        return BlockChain(token_ids, namespace.spec.block_tokens, namespace.seed, self._digest)
