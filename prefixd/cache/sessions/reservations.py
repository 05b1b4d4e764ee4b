"""Reserves slots for engines to fill, and commits the filled blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from prefixd.base.errors import ExhaustedError, InvalidArgumentError, PreconditionError
from prefixd.base.long_work.pacer import give_way
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.moving.allocation import Claim
from prefixd.cache.moving.mover import Mover
from prefixd.cache.namespaces import Namespace
from prefixd.cache.placement.holds import Hold
from prefixd.cache.placement.paths import enter_own, find_path, present
from prefixd.cache.placement.retention import Retained, Retention, RetentionGrant
from prefixd.cache.sessions.claims import ComputeClaims
from prefixd.cache.sessions.durability import Durability
from prefixd.cache.sessions.lease_table import LeaseTable
from prefixd.cache.sessions.quarantine import Quarantine
from prefixd.cache.sessions.sessions import End, Reservation, Session
from prefixd.cache.tiers import Slots
from prefixd.observability.measurements import Traffic
from prefixd_swap import round_to_slot

_COMMIT_BLOCKS, _COMMIT_PARTS = 256, 8192  # entered into the trie at a time, at the most: some milliseconds
_RELEASED_AT_ONCE = 1024  # slots: about a millisecond


@dataclass(frozen=True, slots=True)
class ToFill:
    """Which blocks of a prompt a caller can fill.

    Attributes:
        parts: of each block; all by default.
        first_block: the caller has bytes from this block on; bytes before it that longer prefixes do not need (windows,
            states) may be missing. Where others are, one block is reserved, which says where.
        max_blocks: the most blocks; 0: all.
        ttl_s: see `LeaseTable.ttl`.
        by_daemon: the daemon fills them itself; clients do not know the slots.
    """

    parts: Sequence[int] = ()
    first_block: int = 0
    max_blocks: int = 0
    ttl_s: float = 0.0
    by_daemon: bool = False


class Reservations:
    """Reservations, from the free slots to the committed blocks.

    Args:
        mover: makes room and copies.
        durability: makes committed blocks durable.
        leases: the sessions and their grants.
        retained: grants the retention of committed blocks.
        trie_of: the trie of a namespace.
        limit_bytes: the most that one session may have reserved at once; half of the CPU tier by default.
        admit: waits until the disk has caught up with a tenant's blocks.
        stored: called with committed blocks.
        traffic: counts what is stored.
        computing: claims that commits may end.
        storing: called with the prompt of each reservation.
    """

    def __init__(
        self,
        mover: Mover,
        durability: Durability,
        leases: LeaseTable,
        retained: Retained,
        trie_of: Callable[[Namespace], Trie],
        limit_bytes: int | None,
        admit: Callable[[Tenant], Awaitable[None]],
        stored: Callable[[Trie, Rows], None] | None,
        traffic: Traffic,
        computing: ComputeClaims,
        storing: Callable[[Namespace, BlockChain], None] = lambda namespace, chain: None,
    ) -> None:
        self._traffic = traffic
        self._tiers = mover.tiers
        self._mover = mover
        self._placement = mover.placement
        self._holds = mover.placement.holds
        self._durability = durability
        self._leases = leases
        self._retained = retained
        self._trie_of = trie_of
        self._limit_bytes = self._tiers.shared.capacity_bytes // 2 if limit_bytes is None else limit_bytes
        self._clock = mover.placement.clock
        self._admit = admit
        self._stored = stored
        self._computing = computing
        self._storing = storing
        self._returning: set[asyncio.Task[None]] = set()
        self.quarantine = Quarantine(self._give_back)

    async def reserve(
        self, session: Session, namespace: Namespace, chain: BlockChain, asked: ToFill | None = None
    ) -> Reservation | int:
        """Reserves slots for the blocks of `chain` that are not cached; the number of blocks if all are cached.

        Raises:
            UnsupportedError: there is no CPU tier.
            InvalidArgumentError: the first block to fill lies behind the last block.
            ExhaustedError: there is no room for any block and nothing may be evicted, or the session has too many
                grants.
        """
        self._tiers.check_shared()
        asked, trie = asked or ToFill(), self._trie_of(namespace)
        self._leases.admit(session)
        ttl_s = self._leases.ttl(asked.ttl_s)
        parts, first_block = namespace.check_parts(asked.parts), asked.first_block
        if first_block > len(chain):
            raise InvalidArgumentError(
                f"first_block is {first_block}, but token_ids has {len(chain)} full blocks; send all tokens"
            )
        with self._mover.working():
            await self._admit(self._mover.use.tenant_of(namespace))
            if self._returning:  # wait for slots that are being freed, instead of evicting blocks
                await asyncio.wait(self._returning)
            path = await find_path(trie, namespace, chain)
            known = present(trie, path, parts, first_block, self._tiers.shared.level)
            wanted = min(len(chain) - known, asked.max_blocks or len(chain))
            if not wanted:
                return len(chain)
            if known < first_block:
                wanted = 1  # the caller cannot fill any, and learns where the prefix ends
            identity = self._leases.next_id()
            hold, slots = await self._allocate(session, trie, path[:known], parts, wanted, f"reservation {identity}")
            reservation = Reservation(
                *(identity, session, namespace, trie, chain, hold, known, parts, slots),
                self._clock() + ttl_s,
                self.end,
                asked.by_daemon,
                granted_s=self._clock(),
            )
            self._leases.grant(reservation)
            self._storing(namespace, chain)
            return reservation

    async def _allocate(
        self, session: Session, trie: Trie, prefix: Rows, parts: tuple[int, ...], blocks: int, owner: str
    ) -> tuple[Hold, Slots]:
        """Holds the prefix, and allocates slots for up to `blocks` blocks behind it, at least one.

        Raises:
            ExhaustedError: there is no room.
        """
        shared, use, tenant = self._tiers.shared, self._mover.use, session.tenant
        sizes = [trie.part_bytes[part] for part in parts]
        # Without a tier below, the bytes of blocks that must exist stay here.
        counted = shared if self._tiers.own[-1] is shared else None
        hold = self._holds.hold(owner, trie, prefix, counted=counted)
        session.reserved.whole = use.granted(tenant, shared)

        def limit() -> int:
            left, to_hold = self._left(session, shared.footprint(sizes)), use.room_to_hold(tenant, shared)
            return left if to_hold is None else min(left, to_hold)

        try:
            near = trie.slots[prefix[-1], shared.level][list(parts)].tolist() if len(prefix) else []
            slots = await self._mover.slots.allocate(
                shared, sizes, blocks, Claim(tenant=tenant, account=session.reserved, limit=limit), near
            )
            if not len(slots):
                self._refuse(session, sizes)
        except BaseException:
            hold.end()
            raise
        return hold, slots

    def _left(self, session: Session, nbytes: int) -> int:
        """Bytes that a session may still reserve: the limit less its reservations and its slots in quarantine.

        If it has none of these, at least `nbytes`, one block.
        """
        have = session.reserved.nbytes + sum(process.quarantined_bytes for process in session.processes)
        return self._limit_bytes - have if have else max(self._limit_bytes, nbytes)

    def _refuse(self, session: Session, sizes: Sequence[int]) -> None:
        """Raises the ExhaustedError that says why no block with parts of `sizes` bytes can be reserved."""
        shared, use, tenant = self._tiers.shared, self._mover.use, session.tenant
        nbytes = shared.footprint(sizes)
        tier = f"the CPU tier ({shared.capacity_bytes} bytes)"
        if not shared.ever_fits(sizes):
            raise ExhaustedError(
                f"a block of {sum(sizes)} bytes does not fit into {tier} even when it is empty; raise cpu.bytes"
            )
        left = self._left(session, nbytes)
        if left < nbytes:
            tenant.refused["reserved_bytes"] += 1
            raise ExhaustedError(
                f"tenant {tenant.name}: session {session.id[:8]} may reserve {self._limit_bytes} bytes at once (limit "
                f"transfers.reserved_bytes), and {max(left, 0)} are left for a block of {nbytes}; "
                "commit or release reservations, or have the operator raise the limit"
            )
        to_hold = use.room_to_hold(tenant, shared)
        if to_hold is not None and to_hold < nbytes:
            use.refuse_to_hold(tenant, shared, "release leases and reservations")
        use.refuse_at_most(tenant, shared, nbytes, "release leases and reservations")
        waiting = self.quarantine.nbytes
        kept = f" ({waiting} bytes wait for silent clients to release or end)" if waiting else ""
        raise ExhaustedError(
            f"{tier} has no room for a block of {sum(sizes)} bytes and nothing in it may be evicted{kept}; release "
            "leases or raise cpu.bytes"
        )

    def check(self, reservation: Reservation, blocks: int, durable: bool) -> None:
        """Raises an error unless the first `blocks` of a reservation can be committed now."""
        self._leases.find(reservation.session, reservation.id)  # it may have expired while it was filled
        if not 0 <= blocks <= len(reservation.slots):
            raise InvalidArgumentError(
                f"commit of {blocks} blocks, but reservation {reservation.id} has {len(reservation.slots)}; "
                "commit only what was reserved"
            )
        if durable and self._tiers.durable is None:
            raise PreconditionError("durable commit without a disk tier; set disk.bytes or commit without durable")

    async def commit(
        self, reservation: Reservation, blocks: int, *, durable: bool = False, retention: Sequence[Retention] = ()
    ) -> tuple[int, int]:
        """Makes the first `blocks` of a reservation matchable and ends it; returns (committed, duplicates).

        With `durable` it returns when they and the prefix before them are on disk. `retention` is for all cached blocks
        of the prompt. Beyond the tenant's quota it is not granted (`Reservation.retention_refused`).

        Raises:
            ExhaustedError: with `durable`, there is no room on disk.
        """
        with self._mover.working():
            self.check(reservation, blocks, durable)
            if not retention:
                return await self._commit(reservation, blocks, durable, None)
            trie, prefix = reservation.trie, reservation.prefix.rows
            groups = int(np.bitwise_or.reduce(trie.part_mask[list(reservation.parts)]))
            more = max(reservation.first_block + blocks - len(prefix), 0)
            with await self._retained.grant(
                reservation.namespace, trie, retention, prefix, more, groups, optional=True
            ) as granted:
                reservation.retention_refused = granted.refused
                self.check(reservation, blocks, durable)  # again: granting may have taken a while
                return await self._commit(reservation, blocks, durable, granted)

    async def _commit(
        self, reservation: Reservation, blocks: int, durable: bool, retention: RetentionGrant | None
    ) -> tuple[int, int]:
        self._leases.forget(reservation, End.COMMITTED)
        trie, placement = reservation.trie, self._placement
        prefix = reservation.prefix.rows
        owner = reservation.prefix.owner
        held = [self._holds.hold(owner, trie, prefix)]  # since the reservation's own hold ends earlier
        committed = 0
        rows = [prefix]
        end = reservation.first_block + blocks if blocks else 0
        step = max(1, min(_COMMIT_BLOCKS, _COMMIT_PARTS // len(trie.part_bytes)))
        try:
            before = await self._own_prefix(reservation, prefix, held)
            if len(before) < len(prefix):  # a key is another block's
                placement.lost["key collision"] += blocks
                end = 0
            for start in range(len(prefix), end, step):  # from the first block that has no row, perhaps
                if start > len(prefix):
                    await give_way()  # enter a long prompt in steps, to let others run
                entered, new = self._enter(reservation, before, start, min(start + step, end))
                before = entered
                committed += len(new)
                if self._stored is not None:
                    self._stored(trie, new)
                held.append(self._holds.hold(owner, trie, entered))
                self._mover.checksums.begin(trie, entered)
                rows.append(entered)
                if len(entered) < min(step, end - start):  # the next key is another block's
                    placement.lost["key collision"] += min(end - start - len(entered), blocks)
                    break
            self._count_stored(reservation, committed)
            path = np.concatenate(rows)
            trie.touch(path, self._clock())  # the whole path: a block must not be worth less than its children
            placement.extend(trie, path)
            if self._computing.concern(reservation.namespace):
                tenant, usable = reservation.session.tenant, len(trie.usable(path))
                self._computing.note_cached(tenant, reservation.namespace, reservation.chain, usable)
            if retention is not None:
                await retention.apply_all(path)
            self.end(reservation, True)
            if durable:
                await self._durability.write(trie, path)
        finally:
            self._mover.changed.set()  # also if cancelled: entered blocks wait to be written
            if len(reservation.slots):
                self.end(reservation, True)
            for hold in held:
                hold.end()
        return committed, max(len(path) - reservation.first_block, 0) - committed

    def _count_stored(self, reservation: Reservation, blocks: int) -> None:
        nbytes = blocks * sum(reservation.trie.part_bytes[part] for part in reservation.parts)
        if nbytes:
            reservation.session.stored_bytes += nbytes
            self._traffic.stored_bytes.add(nbytes, *reservation.namespace.spec.who)

    async def _own_prefix(self, reservation: Reservation, prefix: Rows, held: list[Hold]) -> Rows:
        """`prefix`, or if it ends with a common block, the namespace's own rows of these blocks.

        Adds missing rows, and the hold on them to `held`. Returns fewer rows if a key is another block's.
        """
        trie, namespace = reservation.trie, reservation.namespace
        if not len(prefix) or trie.namespace[prefix[-1]] == namespace.ordinal:
            return prefix
        held.append(self._holds.hold(reservation.prefix.owner, trie, prefix[:0]))
        await enter_own(held[-1], namespace, reservation.chain, len(prefix), self._clock())
        return held[-1].rows

    def _enter(self, reservation: Reservation, before: Rows, start: int, end: int) -> tuple[Rows, Rows]:
        """Enters blocks `start` to `end` of a reservation's prompt behind the rows `before`.

        Blocks before the reservation's first block get a row without bytes. Returns the rows, and those of them that
        lacked a reserved part before.
        """
        trie, chain, namespace = reservation.trie, reservation.chain, reservation.namespace
        keys, tokens = chain.key_rows(start, end), chain.token_rows[start:end]
        parent = int(before[-1]) if len(before) else namespace.root
        rows, _ = trie.insert_path(parent, namespace.ordinal, keys, tokens, self._clock())
        bare = max(reservation.first_block - start, 0)
        return rows, self._fill(reservation, start + bare - reservation.first_block, rows[bare:])

    def end(self, reservation: Reservation, at_its_word: bool) -> None:
        """Releases a reservation's prefix, and frees its slots, or keeps them in quarantine unless `at_its_word`."""
        blocks, slots = len(reservation.slots), reservation.slots[reservation.slots != NO_SLOT]
        reservation.slots = reservation.slots[:0]
        if at_its_word:
            self._give_back(slots)
        else:
            sizes = [round_to_slot(reservation.trie.part_bytes[part]) for part in reservation.parts]
            self.quarantine.keep(reservation, slots, blocks * sum(sizes))
        reservation.prefix.end()

    def _give_back(self, slots: Slots) -> None:
        """Frees slots in the CPU tier: now as many as take a millisecond, the others soon."""
        self._tiers.shared.free(slots[:_RELEASED_AT_ONCE])
        if len(slots) > _RELEASED_AT_ONCE:
            task = self._mover.spawn(self._give_back_later(slots[_RELEASED_AT_ONCE:]))
            self._returning.add(task)
            task.add_done_callback(self._returning.discard)

    async def _give_back_later(self, slots: Slots) -> None:
        for start in range(0, len(slots), _RELEASED_AT_ONCE):
            await give_way()
            self._tiers.shared.free(slots[start : start + _RELEASED_AT_ONCE])

    def _fill(self, reservation: Reservation, start: int, rows: Rows) -> Rows:
        """Enters the parts of reserved blocks, from index `start` on, that the CPU tier lacks.

        Returns the rows that lacked a part. The other slots stay with the reservation.
        """
        trie, parts = reservation.trie, list(reservation.parts)
        if not len(rows):
            return rows
        reserved = reservation.slots[start : start + len(rows)]
        lacks = trie.slots[rows, self._tiers.shared.level][:, parts] == NO_SLOT
        slots = np.full((len(rows), len(trie.part_bytes)), NO_SLOT, np.int64)
        slots[:, parts] = np.where(lacks, reserved, NO_SLOT)
        new = lacks.any(axis=1)
        self._placement.put(trie, rows[new], self._tiers.shared, slots[new])
        reservation.slots[start : start + len(rows)] = np.where(lacks, NO_SLOT, reserved)
        entered: Rows = rows[new]
        return entered
