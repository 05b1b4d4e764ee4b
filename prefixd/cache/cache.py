"""The cache: what engines and the daemon's own worker ask of it.

Engines outside read and fill blocks in the CPU tier's shared arena (`acquire`, `reserve`, `commit`); the worker's
blocks are born in the GPU tier (`record`). Both stand in the same trie.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from prefixd.base import heap
from prefixd.base.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from prefixd.base.pacer import give_way
from prefixd.base.steps import do_at_once
from prefixd.base.tenants import Tenant, Tenants
from prefixd.cache.background.common_blocks import CommonBlocks
from prefixd.cache.background.prefetches import Prefetches
from prefixd.cache.background.refused_blocks import RefusedBlocks
from prefixd.cache.background.scrubber import Scrubber
from prefixd.cache.background.write_back import WriteBack
from prefixd.cache.disk.restore import known_namespaces, remove_refused, remove_unused, restore
from prefixd.cache.index.keys import BlockChain, Digest, xxh3_digest
from prefixd.cache.index.trie import NO_SLOT, NONE, TIERS, Match, Observer, Rows, Trie
from prefixd.cache.moving.beginnings import Beginning, Reader
from prefixd.cache.moving.mover import Mover
from prefixd.cache.namespace_room import NamespaceRoom
from prefixd.cache.namespaces import Namespace, NamespaceRegistry, NamespaceSpec
from prefixd.cache.placement.paths import find_path
from prefixd.cache.placement.retention import Retained, Retention, Wish
from prefixd.cache.remote import RemoteOptions
from prefixd.cache.sessions.pins import Pins, restore_pins
from prefixd.cache.sessions.reservations import Reservations
from prefixd.cache.sessions.sessions import Lease, LeaseTable, Process, Reservation, Session
from prefixd.cache.tiers import Tiers
from prefixd_swap import CopyEngine, EvictionPolicy, UseHistory
from prefixd_swap.eviction.use_history import REMEMBERED

Claim = tuple[Trie, Rows, list[int]]
_ENDED_AT_ONCE = 1 << 16  # held blocks whose hold ends in one turn, about a millisecond,
_ENDED_WITH_A_GRANT = 1 << 11  # and what a grant costs besides, in blocks
_LOOKED_AT = 1024  # namespaces that are looked at, at a limit, for those that nobody uses: a millisecond,
_LOOKED_AT_WITH_A_NEW_ONE = 2  # and whenever one is new: there are never many more than are used
MAX_BLOCKS = 1 << 20
"""Blocks of a prompt, in one call. At 4 tokens a block it is as many tokens as a message can have."""
NO_OFFSET = np.uint64(2**64 - 1)
P = ParamSpec("P")
T = TypeVar("T")


def _working(
    method: Callable[Concatenate[TieredCache, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[TieredCache, P], Coroutine[Any, Any, T]]:
    """A call that holds blocks, or has slots in hand, until it has ended."""

    async def working(self: TieredCache, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.mover.working():
            return await method(self, *args, **kwargs)

    functools.update_wrapper(working, method)
    return working


@dataclass(slots=True)
class CacheCounters:
    """Prompt tokens asked for and found since the start, once a prompt; the rest, asked - found, was not found.

    Found is what was granted to be read: what is cached and has no room where it is read is no hit.
    """

    asked_tokens: int = 0
    hit_tokens: list[int] = field(default_factory=lambda: [0] * TIERS)  # by the tier they were found in

    def ask(self, tokens: int) -> None:
        """So many prompt tokens were asked for."""
        self.asked_tokens += tokens

    def find(self, tiers: npt.NDArray[np.int8], block_tokens: int) -> None:
        """Blocks were granted that had been found in these tiers."""
        for tier, blocks in enumerate(np.bincount(tiers, minlength=TIERS)[:TIERS].tolist()):
            self.hit_tokens[tier] += blocks * block_tokens


class TieredCache:
    """The trie, the tiers and the leases of one daemon. Used from the event loop alone.

    Args:
        tiers: the memory.
        engine: copies between memory spans.
        policy: eviction policy.
        clock: seconds, monotonic.
        default_ttl_s: lifetime of a lease that asked for none.
        max_ttl_s: longest lifetime of a lease.
        max_sessions: sessions open at once.
        max_grants: leases and reservations of one session at once.
        namespace_bytes: the most memory that namespaces may take; then the least recently used are forgotten.
        write_back: copy down ahead of need.
        scrub_bytes_per_s: the most that the scrubber reads from disk; 0: no scrubber in the background.
        scrub_every_s: how long after the last one a pass of the scrubber begins.
        write_queue_bytes: blocks that may wait in memory to be written to disk before `reserve` waits; half of the CPU
            tier by default.
        prefetch_bytes: the most that one tenant may have on its way ahead of need; half of the shared tier by default.
        reserved_bytes: the most that one session may have reserved at once; half of the shared tier by default.
        admit_uses: see `Placement`.
        remote: how the remote tier is used, where there is one.
        tenants: to whom sessions and namespaces belong.
        share_after: blocks become common to all tenants when so many have computed them; 0: never, 1: at once.
        digest: block key function; replaced in tests.
    """

    def __init__(
        self,
        tiers: Tiers,
        engine: CopyEngine,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        *,
        default_ttl_s: float = 60.0,
        max_ttl_s: float = 3600.0,
        max_sessions: int = 256,
        max_grants: int = 4096,
        namespace_bytes: int = 64 << 20,
        write_back: bool = True,
        scrub_bytes_per_s: int = 0,
        scrub_every_s: float = 3600.0,
        write_queue_bytes: int | None = None,
        prefetch_bytes: int | None = None,
        reserved_bytes: int | None = None,
        admit_uses: int = 0,
        remote: RemoteOptions | None = None,
        tenants: Tenants | None = None,
        share_after: int = 0,
        digest: Digest = xxh3_digest,
    ) -> None:
        self.tiers = tiers
        self.clock = clock
        self.tenants = tenants or Tenants()
        self.namespaces = NamespaceRegistry(with_common=share_after > 1)
        self.tries: list[Trie] = []
        self.counters = CacheCounters()
        self.claims: list[Callable[[], Iterator[Claim]]] = []
        """Who else has a part of the GPU tier, for `check_integrity`: rows held without a `Hold`, frames in flight."""
        self.policy = policy
        # Where there is no other tier, the GPU tier comes with the worker.
        policy.last_tier = max((tier.level for tier in tiers.own), default=tiers.compute.level)
        uses = UseHistory(policy, REMEMBERED if policy.remembers or admit_uses else 0)
        self.mover = Mover(
            tiers, self.tries, self.namespaces, engine, policy, clock, uses, admit_uses, remote, self.tenants
        )
        if write_queue_bytes is None and tiers.exists(tiers.shared):
            write_queue_bytes = tiers.shared.capacity_bytes // 2
        if prefetch_bytes is None:
            prefetch_bytes = tiers.shared.capacity_bytes // 2
        if reserved_bytes is None:
            reserved_bytes = tiers.shared.capacity_bytes // 2
        self.write_back = WriteBack(self.mover, enabled=write_back, limit_bytes=write_queue_bytes)
        self.scrubber = Scrubber(self.mover, clock, bytes_per_s=scrub_bytes_per_s, every_s=scrub_every_s)
        self.refused = RefusedBlocks(self.mover)
        self._uncut: set[Beginning] = set()
        self._prefetches = Prefetches(self.mover, prefetch_bytes)
        self.leases = LeaseTable(
            self._end_grants,
            self._prefetches.end,
            default_ttl_s=default_ttl_s,
            max_ttl_s=max_ttl_s,
            max_sessions=max_sessions,
            max_grants=max_grants,
            tenants=self.tenants,
        )
        self.common: CommonBlocks | None = None
        """What makes blocks common, where that takes several tenants."""
        if share_after > 1:
            self.common = CommonBlocks(self.mover, self.namespaces, self._chain, clock, share_after)
        self._share_at_once = share_after == 1
        self._reservations = Reservations(tiers, self.mover, self.leases, clock, reserved_bytes, self._stored)
        self.quarantine = self._reservations.quarantine
        self.pins = Pins(self.mover, self._reservations)
        self.retained = Retained(tiers, self.tries, self._tenant_at, clock, lambda: self.tenants.calling)
        self._digest = digest
        self._trie_of: dict[tuple[object, ...], Trie] = {}  # by geometry
        self._tries: dict[int, Trie] = {}  # by the namespace's ordinal
        self._unsaved: list[bytes] = []  # ids of namespaces that were forgotten and are to leave the disk
        self._users: Counter[int] = Counter()  # namespaces that are known, by their trie's ordinal
        self._observers: tuple[Observer, ...] = ()
        self.namespace_room = NamespaceRoom(
            self.namespaces,
            self.tenants,
            self.leases,
            self.mover,
            self._tries.__getitem__,
            self._forgot_namespace,
            tiers.troubles,
            clock,
            namespace_bytes,
        )

    # -- life ---------------------------------------------------------------------------------------------------

    def restore(self) -> int:
        """Reads the disk tier's index into the empty tries; returns how many blocks came back. See `restore`.

        Raises:
            StorageError: the index cannot be read.
        """
        store = self.tiers.durable
        if store is None:
            return 0
        records, stored = store.load(), store.namespaces()
        known = known_namespaces(stored, records.namespaces, self.namespaces)
        for namespace in known.values():
            self._give_trie(namespace)
        restored = restore(records, known, self.trie, self.mover.placement, store.level)
        restore_pins(store, known, self.trie)
        do_at_once(self.mover.use.count_pinned(self.tries))
        remove_refused(store, restored)
        used = {identity for identity, namespace in known.items() if self._has_blocks(namespace)}
        remove_unused(store, stored.keys() - used)
        self.mover.disk.metadata.saved.update(used)
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

    def register(self, spec: NamespaceSpec) -> Namespace:
        """The namespace for `spec`; durable with its first block on disk. It stays for whoever has a reference to it.

        It is the one of all tenants where blocks are common at once.

        Raises:
            InvalidArgumentError: the spec itself is wrong.
            AlreadyExistsError: its id is another one's, by chance.
            ExhaustedError: it would be one too many, for its tenant or in all.
        """
        if self._share_at_once and spec.may_be_common:
            spec = spec.common
        known = self.namespaces.find(spec)
        if known is not None:
            self.namespaces.touch(known)
            return known
        spec.check()
        self._forget_namespaces(_LOOKED_AT_WITH_A_NEW_ONE)
        tenant = self.tenants.known(spec.tenant)
        nbytes = spec.nbytes
        if not self.namespace_room.fits(tenant, nbytes):
            self._forget_namespaces()
        self.namespace_room.check(tenant, nbytes)
        return self._give_trie(self.namespaces.register(spec))

    async def open_namespace(self, session: Session, spec: NamespaceSpec) -> Namespace:
        """Registers a namespace and opens it to a session, with room made for it. Raises as `register`."""
        if self.namespaces.find(spec) is None:
            spec.check()  # before anything is forgotten for its sake
            await self.namespace_room.make(session.tenant, spec.nbytes)
            self.leases.session(session.id)
        namespace = self.register(spec)
        session.open_namespace(namespace)
        return namespace

    def open_in(self, session: Session, identity: bytes) -> Namespace:
        """A namespace that is open to a session, which uses it now. Raises as `Session.namespace`."""
        namespace = session.namespace(identity)
        self.namespaces.touch(namespace)
        return namespace

    def unlisted(self, spec: NamespaceSpec) -> Namespace:
        """A namespace like `spec`, for a request that finds nothing and leaves nothing in the cache."""
        spec.check()
        self._forget_namespaces(_LOOKED_AT_WITH_A_NEW_ONE)
        return self._give_trie(self.namespaces.unlisted(spec))

    def trie(self, namespace: Namespace) -> Trie:
        """The trie that has the namespace's blocks."""
        return self._tries[namespace.ordinal]

    def _give_trie(self, namespace: Namespace) -> Namespace:
        geometry = _geometry(namespace.spec)
        trie = self._trie_of.get(geometry)
        if trie is None:
            trie = self._trie_of[geometry] = self._new_trie(namespace.spec)
        for each in (namespace, namespace.common):
            if each is not None and each.ordinal not in self._tries:
                self._tries[each.ordinal] = trie
                self._users[trie.ordinal] += 1
                self.mover.use.assign(each.ordinal, self.tenants.known(each.spec.tenant))
        return namespace

    def _tenant_at(self, ordinal: int) -> Tenant:
        """To whom the namespace with this ordinal belongs."""
        return self.tenants.known(self.namespaces.at(ordinal).spec.tenant)

    def _has_blocks(self, namespace: Namespace) -> bool:
        return self.trie(namespace).blocks_of(namespace.ordinal) > 0

    def _forget_namespaces(self, most: int = _LOOKED_AT) -> None:
        """Forgets namespaces that nobody uses and that have no blocks, among those looked at."""
        for ordinal, identity in self.namespaces.forget_unused(self._has_blocks, most):
            self._forgot_namespace(ordinal, identity)

    def _forgot_namespace(self, ordinal: int, identity: bytes) -> None:
        self._users[self._tries.pop(ordinal).ordinal] -= 1
        if identity in self.mover.disk.metadata.saved:
            self._unsaved.append(identity)
            if len(self._unsaved) == 1:  # the others of this turn go with it
                self.mover.spawn(self._forget_saved())

    async def _forget_saved(self) -> None:
        unsaved, self._unsaved = self._unsaved, []
        await self.mover.disk.metadata.forget_namespaces(unsaved)

    def _new_trie(self, spec: NamespaceSpec) -> Trie:
        """A trie for blocks like the namespace's: one that no namespace uses any more, if there is one."""
        part_bytes, rules = [part.nbytes for part in spec.parts], spec.group_rules()
        if unused := [trie for trie in self.tries if not self._users[trie.ordinal]]:
            trie = min(unused, key=lambda each: each.rows)
            self._trie_of = {geometry: each for geometry, each in self._trie_of.items() if each is not trie}
            trie.reshape(spec.block_tokens, part_bytes, rules)
            self.policy.observe_compute_time(trie, lambda tokens: None)  # it is not known for these blocks yet
            return trie
        trie = Trie(spec.block_tokens, part_bytes, len(self.tries), rules)
        if self.tiers.durable is not None:
            trie.offer(self.tiers.durable.level, self.tiers.durable.gives)
        if self.tiers.remote is not None:
            trie.offer(self.tiers.remote.level, self.tiers.remote.gives)
        trie.observer = self._observer
        trie.on_retained = self.retained.count
        self.tries.append(trie)
        return trie

    def observe(self, observer: Observer) -> None:
        """Has `observer` told of changes in all tries from now on."""
        self._set_observers((*self._observers, observer))

    def unobserve(self, observer: Observer) -> None:
        """Has `observer` told of nothing any more."""
        self._set_observers(tuple(each for each in self._observers if each != observer))

    def _set_observers(self, observers: tuple[Observer, ...]) -> None:
        self._observers = observers
        observer = self._observer
        for trie in self.tries:
            trie.observer = observer

    @property
    def _observer(self) -> Observer | None:
        """Tells all of them."""
        observers = self._observers
        if len(observers) < 2:
            return observers[0] if observers else None

        def tell(trie: Trie, rows: int | Rows) -> None:
            for observer in observers:
                observer(trie, rows)

        return tell

    # -- finding ------------------------------------------------------------------------------------------------

    def chain(self, namespace: Namespace, token_ids: bytes) -> BlockChain:
        """The blocks of a prompt; InvalidArgumentError for an empty prompt, a torn token, or too many blocks."""
        if not token_ids:
            raise InvalidArgumentError("token_ids is empty; send at least one token")
        if len(token_ids) % 4:
            raise InvalidArgumentError(
                f"token_ids has {len(token_ids)} bytes, no multiple of 4; send little-endian uint32"
            )
        chain = self._chain(namespace, token_ids)
        if len(chain) > MAX_BLOCKS:
            raise InvalidArgumentError(
                f"token_ids has {len(chain)} blocks of {chain.block_tokens} tokens; a call takes {MAX_BLOCKS} at most: "
                "send fewer tokens, or register the namespace with more tokens a block"
            )
        return chain

    def _chain(self, namespace: Namespace, token_ids: bytes) -> BlockChain:
        return BlockChain(token_ids, namespace.spec.block_tokens, namespace.seed, self._digest)

    async def match(self, namespace: Namespace, chain: BlockChain, limit: int | None = None) -> Match:
        """The longest cached prefix, at the moment when this returns; counts as use. A shared store is asked, too."""
        trie = self.trie(namespace)
        await self.look_in_store(namespace, chain, limit)
        match = Match(trie.usable(await find_path(trie, namespace, chain, limit)))
        self.mover.placement.touch(trie, match.rows)
        return match

    async def look_in_store(self, namespace: Namespace, chain: BlockChain, limit: int | None = None) -> None:
        """Has the trie know what a shared store has of a prompt, where there is one and it is in service."""
        if self.mover.remote is not None:
            await self.mover.remote.look(self.trie(namespace), namespace, chain, limit)

    def count_lookup(self, session: Session, namespace: Namespace, chain: BlockChain, rows: Rows) -> None:
        """Counts a session's lookup of one prompt, of which these blocks were found.

        By where they lay when the session gave a hint for the prompt (`prefetch`), else by where they are.
        """
        trie = self.trie(namespace)
        self.counters.ask(len(chain) * trie.block_tokens)
        self.counters.find(self._tiers_at_arrival(session, namespace, chain, rows), trie.block_tokens)

    def _tiers_at_arrival(
        self, session: Session, namespace: Namespace, chain: BlockChain, path: Rows
    ) -> npt.NDArray[np.int8]:
        before = session.arrivals.take(namespace, chain, self.clock())
        return _overlaid(self.trie(namespace).distances(path), before)

    # -- engines' side --------------------------------------------------------------------------------------------

    @_working
    async def acquire(
        self,
        session: Session,
        namespace: Namespace,
        chain: BlockChain,
        *,
        first_block: int = 0,
        max_blocks: int = 0,
        prefix_blocks: int = 0,
        ttl_s: float = 0.0,
        counted: bool = True,
        found: npt.NDArray[np.int8] | None = None,
        matched: Callable[[Reader], None] | None = None,
    ) -> Lease | None:
        """Leases the cached prefix from `first_block` on in the CPU tier; None when nothing is cached there.

        The lease is shorter than the match when the CPU tier cannot take it all, when the tenant may hold no more, or
        when a block turns out to be damaged: it is the longest beginning for which there is room (`beginnings`).

        Args:
            session: whose lease it is.
            namespace: the prompt's.
            chain: its blocks.
            first_block: what is before it is of no interest.
            max_blocks: so many at the most; 0: all.
            prefix_blocks: the blocks are read as a slice of a prefix of this length; 0: the prompt goes on behind them.
            ttl_s: see `LeaseTable.ttl`.
            counted: this is the lookup by which the prompt enters the hit rates; what is leased counts as found.
            found: the prompt was counted as asked for, and what is leased counts as found: in these tiers, from the
                prompt's first block on, and behind them where it is. `counted` is not looked at.
            matched: called with what is to be read before anything of it is brought up.

        Raises:
            ExhaustedError: the tenant may hold nothing more in the CPU tier, or have nothing more there.
        """
        self._need_cpu()
        self.leases.admit(session)
        ttl = self.leases.ttl(ttl_s)
        trie = self.trie(namespace)
        end = min(first_block + max_blocks, len(chain)) if max_blocks else len(chain)
        path = (await self.match(namespace, chain, prefix_blocks or end)).rows
        if counted and found is None:
            self.counters.ask(max(end - first_block, 0) * trie.block_tokens)
        if trie.has_rules and len(path) < prefix_blocks:  # of a shorter prefix, other bytes are needed
            end = first_block
        reader = Reader(trie, path, first_block, min(end, len(path)), slice_only=prefix_blocks > 0)
        if matched is not None:
            matched(reader)
        tiers = (
            self._tiers_at_arrival(session, namespace, chain, path)
            if counted and found is None
            else _overlaid(trie.distances(path), found)
        )
        identity = self.leases.next_id()
        wanted = self._holdable(session.tenant, reader)
        beginning = Beginning(self.mover, f"lease {identity}", wanted, self._uncut)
        await beginning.bring(give_way=partial(self._prefetches.end_of, session.tenant))
        try:
            # Others were granted leases meanwhile, and a shorter prefix may need other bytes.
            while (reader := self._holdable(session.tenant, beginning.reader)) != beginning.reader:
                beginning.cut(reader)
                await beginning.bring()
            if len(wanted.rows) and not len(reader.rows):
                nbytes = self.mover.use.footprint(self.tiers.shared, trie.part_bytes)
                self.mover.use.refuse_at_most(session.tenant, self.tiers.shared, nbytes, "release leases")
        except BaseException:
            beginning.hold.end()
            raise
        hold = beginning.keep()
        if not len(hold.rows):
            hold.end()
            return None
        lease = Lease(identity, session, hold, self.clock() + ttl)
        self.leases.grant(lease)
        if counted or found is not None:
            self.counters.find(tiers[first_block : reader.end], trie.block_tokens)
        return lease

    def _holdable(self, tenant: Tenant, reader: Reader) -> Reader:
        """The longest beginning of what is read of which a tenant may hold in the CPU tier what is needed.

        Common blocks in it are held on the account of all tenants.

        Raises:
            ExhaustedError: it may not hold even the first block.
        """
        shared, use, trie = self.tiers.shared, self.mover.use, reader.trie
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
        """[blocks, parts]: arena offsets of leased parts; `NO_OFFSET` for a part that its KV group's rule does not
        need."""
        trie, chosen = lease.trie, list(parts)
        slots = trie.slots[lease.rows[blocks], self.tiers.shared.level][:, chosen]
        offsets: npt.NDArray[np.uint64] = slots.astype(np.uint64)
        if lease.hold.wanted is not None:
            offsets[(lease.hold.wanted[blocks, None] & trie.part_mask[chosen]) == 0] = NO_OFFSET
        return offsets

    def check_parts(self, namespace: Namespace, parts: Sequence[int]) -> tuple[int, ...]:
        """The part indices meant by `parts` (empty: all); InvalidArgumentError for unknown or repeated ones."""
        have = len(namespace.spec.parts)
        if not parts:
            return tuple(range(have))
        if len(parts) > have:
            raise InvalidArgumentError(
                f"parts has {len(parts)} numbers; the namespace has {have} parts, name each once"
            )
        for part in parts:
            if not 0 <= part < have:
                raise InvalidArgumentError(f"part {part} does not exist; the namespace has parts 0 to {have - 1}")
        if len(set(parts)) != len(parts):
            raise InvalidArgumentError(f"parts {list(parts)} name one twice; name each once")
        return tuple(parts)

    @_working
    async def reserve(
        self,
        session: Session,
        namespace: Namespace,
        chain: BlockChain,
        *,
        parts: Sequence[int] = (),
        first_block: int = 0,
        max_blocks: int = 0,
        ttl_s: float = 0.0,
        by_daemon: bool = False,
    ) -> Reservation | int:
        """Slots for the blocks of `chain` that are not cached; the number of blocks when all are.

        `first_block`: the caller has bytes from this block on; bytes before it that longer prefixes do not need
        (windows, states) may be missing. `max_blocks`: so many at the most; 0: all. `by_daemon`: the caller fills them
        here; no client is told where they are.

        Raises:
            InvalidArgumentError: `first_block` lies behind the last block.
            ExhaustedError: there is room for none and nothing may be evicted, or the session has too many grants.
        """
        self._need_cpu()
        self.leases.admit(session)
        ttl = self.leases.ttl(ttl_s)
        chosen = self.check_parts(namespace, parts)
        if first_block > len(chain):
            raise InvalidArgumentError(
                f"first_block is {first_block}, but token_ids has {len(chain)} full blocks; send all tokens"
            )
        await self.write_back.admit(self.mover.use.tenant_of(namespace))
        return await self._reservations.reserve(
            session, namespace, chain, self.trie(namespace), chosen, first_block, max_blocks, ttl, by_daemon
        )

    @_working
    async def commit(
        self, reservation: Reservation, blocks: int, *, durable: bool = False, retention: Sequence[Retention] = ()
    ) -> tuple[int, int]:
        """Makes the first `blocks` of a reservation matchable and ends it; returns (committed, duplicates).

        A wish beyond the tenant's quota is left out (`Reservation.retention_refused`).

        With `durable` it returns when they and the prefix before them are on disk. `retention` is for the prompt as far
        as it is cached then.

        Raises:
            ExhaustedError: with `durable`, there is no room on disk.
        """
        self._reservations.check(reservation, blocks, durable)
        trie = reservation.trie
        groups = int(np.bitwise_or.reduce(trie.part_mask[list(reservation.parts)]))
        path, more = reservation.prefix.rows, max(reservation.first_block + blocks - len(reservation.prefix.rows), 0)
        with await self.retained.wish(
            reservation.namespace, trie, retention, path, more, groups, optional=True
        ) as wish:
            reservation.retention_refused = wish.refused
            return await self._reservations.commit(reservation, blocks, durable, wish)

    @_working
    async def retain(self, namespace: Namespace, chain: BlockChain, retention: Sequence[Retention]) -> int:
        """Gives the cached blocks of a prompt priorities; returns how many have one other than 0 then.

        Without any wish all of them lose theirs.

        Raises:
            InvalidArgumentError: there cannot be such a wish.
            ExhaustedError: it is beyond the tenant's quota; nothing is changed.
        """
        trie = self.trie(namespace)
        path = trie.usable(await find_path(trie, namespace, chain))
        with self.mover.placement.holds.hold("retain", trie, path):
            with await self.retained.wish(namespace, trie, retention or [Retention()], path) as wish:
                await wish.apply_all(path)
            return int(np.count_nonzero(trie.priorities(path, self.clock())))

    @_working
    async def persist(self, namespace: Namespace, chain: BlockChain) -> int:
        """Returns when the cached prefix of `chain` is on disk: its blocks. PreconditionError without a disk tier."""
        trie = self.trie(namespace)
        path = trie.usable(await find_path(trie, namespace, chain))
        return await self._reservations.persist(trie, path)

    def release(self, session: Session, grant_id: str) -> None:
        """Ends a lease or gives up a reservation.

        Raises:
            NotFoundError: it is over already. The slots of a reservation that ended without its holder's word are
                given back all the same: now there is its word.
        """
        try:
            self.leases.release(session, grant_id)
        except NotFoundError:
            self.quarantine.acknowledge(grant_id, session.processes)
            raise

    def process_ended(self, process: Process) -> None:
        """A client's process has ended: nobody writes through its mapping of the arena any more.

        Sessions that no other process has mapped the arena for end with it. Their streams may live on, in a child that
        it forked.
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

        Returns how many blocks are on their way for it: as many as the tenant's limit takes, from the first.

        Raises:
            SessionEndedError: the session ended while the prefix was looked for.
        """
        match = await self.match(namespace, chain)
        self.leases.session(session.id)  # it may have ended meanwhile
        trie = self.trie(namespace)
        blocks = self._prefetches.begin(session, trie, match.rows)
        if blocks:  # nothing has been moved yet
            session.arrivals.note(namespace, chain, trie.distances(match.rows), self.clock())
        return blocks

    # -- the worker's side ----------------------------------------------------------------------------------------

    @_working
    async def wish(
        self, namespace: Namespace, chain: BlockChain, blocks: int, groups: int, retention: Sequence[Retention]
    ) -> Wish:
        """Grants wishes for the first blocks of a prompt, before they are computed. The caller ends what it gets.

        Args:
            namespace: the prompt's.
            chain: its blocks.
            blocks: how many of them will be there.
            groups: the KV groups of which each will have bytes.
            retention: the wishes. Those beyond the tenant's quota are left out (`Wish.refused`).
        """
        trie = self.trie(namespace)
        path = trie.usable(await find_path(trie, namespace, chain, blocks))
        with self.mover.placement.holds.hold("retain", trie, path):
            return await self.retained.wish(namespace, trie, retention, path, blocks - len(path), groups, optional=True)

    def record(
        self,
        namespace: Namespace,
        parent: int,
        chain: BlockChain,
        first_block: int,
        frames: Sequence[int],
        blocks: int | None = None,
    ) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """Enters blocks that the worker has filled, one after the other, in `frames`.

        Nothing holds them yet: the caller has to, before it awaits anything.

        Args:
            namespace: the blocks' namespace.
            parent: the row that the first one continues, or the namespace's root.
            chain: the blocks' prompt.
            first_block: the first one's place in it.
            frames: [m * parts] frames in flight, those of a block side by side: its parts from the first on.
            blocks: m; by default all parts of a block are in frames.

        Returns:
            The blocks' rows, and of each of their frames whether it is the trie's now (it is not when the part was
            there already). Fewer than m blocks when a block's key is another block's, or a block is refused.
        """
        trie = self.trie(namespace)
        now = self.clock()
        count = len(frames) // len(trie.part_bytes) if blocks is None else blocks
        parts = len(frames) // count if count else 0
        end = first_block + count
        keys, tokens = chain.key_rows(first_block, end), chain.token_rows(first_block, end)
        if trie.refused:
            accepted = trie.unrefused(trie.find_all(namespace.ordinal, keys), first_block)
            keys, tokens = keys[:accepted], tokens[:accepted]
        rows, _ = trie.insert_path(parent, namespace.ordinal, keys, tokens, now)
        if len(rows) < len(keys):
            self.mover.lost["key collision"] += 1
        slots = np.full((len(rows), len(trie.part_bytes)), NO_SLOT, np.int64)
        slots[:, :parts] = np.array(frames, np.int64).reshape(count, parts)[: len(rows)]
        taken = (trie.slots[rows, self.tiers.compute.level] == NO_SLOT) & (slots != NO_SLOT)
        some = taken.any(axis=1)
        if some.any():
            slots[~taken] = NO_SLOT
            self.mover.placement.put(trie, rows[some], self.tiers.compute, slots[some])
            self.mover.changed.set()
            self._stored(trie, rows[some])
        trie.touch(rows, now)
        return rows, taken[:, :parts].ravel()

    def record_state(self, trie: Trie, path: Rows, frames: Sequence[int], ends: Sequence[int] = ()) -> bool:
        """Enters the state after the last block of `path`, which begins with a prompt's first block.

        Its frames, in flight, are those of the block's last parts; for `ends` see `Trie.expire`. Returns whether they
        are the trie's now; they are not when the state was there already.
        """
        level, last = self.tiers.compute.level, path[-1:]
        slots = np.full((1, len(trie.part_bytes)), NO_SLOT, np.int64)
        slots[0, -len(frames) :] = frames
        if (trie.slots[last, level][slots != NO_SLOT] != NO_SLOT).any():
            return False
        self.mover.placement.put(trie, last, self.tiers.compute, slots)
        self._stored(trie, last)
        group = int(trie.part_mask[-1])
        self.mover.placement.extend(trie, path, group, ends)
        self.mover.changed.set()
        return True

    # -- inside ---------------------------------------------------------------------------------------------------

    def _stored(self, trie: Trie, rows: Rows) -> None:
        if self.common is not None:
            self.common.stored(trie, rows)

    def _end_grants(self, grants: Sequence[Lease | Reservation], at_its_word: bool) -> None:
        """Gives back what grants protected: as much as takes a millisecond now, the rest soon."""
        left = iter(grants)
        blocks = 0
        for grant in left:
            self._end_grant(grant, at_its_word)
            blocks += _ENDED_WITH_A_GRANT + len(grant.rows if isinstance(grant, Lease) else grant.prefix.rows)
            if blocks >= _ENDED_AT_ONCE:
                break
        if len(rest := list(left)):
            self.mover.spawn(self._end_later(rest, at_its_word))

    async def _end_later(self, grants: Sequence[Lease | Reservation], at_its_word: bool) -> None:
        await give_way()
        self._end_grants(grants, at_its_word)

    def _end_grant(self, grant: Lease | Reservation, at_its_word: bool) -> None:
        if isinstance(grant, Lease):
            grant.hold.end()
        else:
            self._reservations.end(grant, at_its_word)

    def _need_cpu(self) -> None:
        if not self.tiers.exists(self.tiers.shared):
            raise UnsupportedError("this daemon has no CPU tier to share; start it with cpu.bytes above 0")


def _overlaid(tiers: npt.NDArray[np.int8], before: npt.NDArray[np.int8] | None) -> npt.NDArray[np.int8]:
    """Tiers of blocks, of the first ones as they were before, where they were anywhere then."""
    if before is not None:
        before = before[: len(tiers)]
        np.copyto(tiers[: len(before)], before, where=before != NONE)
    return tiers


def _geometry(spec: NamespaceSpec) -> tuple[object, ...]:
    """What blocks of one trie have in common."""
    return (spec.block_tokens, tuple((part.nbytes, part.rule) for part in spec.parts))
