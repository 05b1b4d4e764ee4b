"""How engines fill blocks: slots reserved, committed, and made durable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from prefixd.base.errors import ExhaustedError, InvalidArgumentError, PreconditionError
from prefixd.base.pacer import give_way
from prefixd.cache.index.keys import BlockChain
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.moving.allocation import Claim
from prefixd.cache.moving.mover import Mover
from prefixd.cache.namespaces import Namespace
from prefixd.cache.placement.holds import Hold
from prefixd.cache.placement.paths import enter_own, find_path
from prefixd.cache.placement.retention import Wish
from prefixd.cache.rules import GroupMask, longest_stored
from prefixd.cache.sessions.quarantine import Quarantine
from prefixd.cache.sessions.sessions import LeaseTable, Reservation, Session
from prefixd.cache.tiers import Slots, Tiers
from prefixd_swap import round_to_slot
from prefixd_swap.tiers import StoreTier

_COMMIT_BLOCKS, _COMMIT_PARTS = 256, 8192  # entered into the trie at a time, at the most: some milliseconds
_RELEASED_AT_ONCE = 1024  # slots: about a millisecond


class Reservations:
    """Reservations, from the free slots to the durable blocks.

    Args:
        tiers: the memory.
        mover: makes room and copies.
        leases: whom a reservation belongs to.
        clock: seconds, monotonic.
        limit_bytes: the most that one session may have reserved at once.
        stored: told of blocks that were committed.
    """

    def __init__(
        self,
        tiers: Tiers,
        mover: Mover,
        leases: LeaseTable,
        clock: Callable[[], float],
        limit_bytes: int,
        stored: Callable[[Trie, Rows], None],
    ) -> None:
        self._tiers = tiers
        self._mover = mover
        self._leases = leases
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._stored = stored
        self._returning: set[asyncio.Task[None]] = set()
        self.quarantine = Quarantine(self._give_back)

    async def reserve(
        self,
        session: Session,
        namespace: Namespace,
        chain: BlockChain,
        trie: Trie,
        parts: tuple[int, ...],
        first_block: int,
        max_blocks: int,
        ttl_s: float,
        by_daemon: bool,
    ) -> Reservation | int:
        """See `TieredCache.reserve`; the arguments are checked."""
        if self._returning:  # what is being given back need not be evicted for
            await asyncio.wait(self._returning)
        path = await find_path(trie, namespace, chain)
        known = present(trie, path, parts, first_block, self._tiers.shared.level)
        prefix, wanted = path[:known], len(chain) - known
        if not wanted:
            return len(chain)
        wanted = min(wanted, max_blocks or wanted)
        identity = self._leases.next_id()
        shared, use, tenant = self._tiers.shared, self._mover.use, session.tenant
        sizes = [trie.part_bytes[part] for part in parts]
        # Where there is no tier below, the bytes of what has to exist stay here.
        counted = shared if self._tiers.own[-1] is shared else None
        hold = self._mover.placement.holds.hold(f"reservation {identity}", trie, prefix, counted=counted)
        session.reserved.whole = use.granted(tenant, shared)

        def limit() -> int:
            left, to_hold = self._left(session, shared.footprint(sizes)), use.room_to_hold(tenant, shared)
            return left if to_hold is None else min(left, to_hold)

        try:
            near = trie.slots[prefix[-1], shared.level][list(parts)].tolist() if len(prefix) else []
            slots = await self._mover.slots.allocate(
                shared, sizes, wanted, Claim(tenant=tenant, account=session.reserved, limit=limit), near
            )
            if not len(slots):
                self._refuse(session, sizes)
        except BaseException:
            hold.end()
            raise
        expires_s = self._clock() + ttl_s
        reservation = Reservation(
            identity,
            session,
            namespace,
            trie,
            chain,
            hold,
            known,
            parts,
            slots,
            expires_s,
            by_daemon,
        )
        self._leases.grant(reservation)
        return reservation

    def _left(self, session: Session, nbytes: int) -> int:
        """Bytes that a session may reserve beside what it has, and what its processes may still be writing into: of
        blocks of `nbytes` one at least where there is nothing of that."""
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

    async def commit(self, reservation: Reservation, blocks: int, durable: bool, wish: Wish) -> tuple[int, int]:
        """See `TieredCache.commit`; the wish was granted."""
        self.check(reservation, blocks, durable)  # once more: the wish may have taken a while
        self._leases.forget(reservation, "it was committed")
        trie, placement = reservation.trie, self._mover.placement
        prefix = reservation.prefix.rows
        owner = reservation.prefix.owner
        held = [placement.holds.hold(owner, trie, prefix)]  # the reservation's own hold ends before
        committed = 0
        rows = [prefix]
        end = reservation.first_block + blocks if blocks else 0
        step = max(1, min(_COMMIT_BLOCKS, _COMMIT_PARTS // len(trie.part_bytes)))
        try:
            before = await self._own_prefix(reservation, prefix, held)
            if len(before) < len(prefix):  # a key of it is another block's
                placement.lost["key collision"] += blocks
                end = 0
            for start in range(len(prefix), end, step):  # from the first block that has no row, perhaps
                if start > len(prefix):
                    await give_way()  # a long prompt is entered in steps: others have their turn
                entered, new = self._enter(reservation, before, start, min(start + step, end))
                before = entered
                committed += len(new)
                self._stored(trie, new)
                held.append(placement.holds.hold(owner, trie, entered))
                self._mover.checksums.begin(trie, entered)
                rows.append(entered)
                if len(entered) < min(step, end - start):  # the next key is another block's
                    placement.lost["key collision"] += min(end - start - len(entered), blocks)
                    break
            path = np.concatenate(rows)
            trie.touch(path, self._clock())  # all of it: a block must not be worth less than those that continue it
            placement.extend(trie, path)
            await wish.apply_all(path)
            self.end(reservation, True)
            if durable:
                await self._make_durable(trie, path)
            else:
                self._mover.changed.set()
        finally:
            if len(reservation.slots):
                self.end(reservation, True)
            for hold in held:
                hold.end()
        return committed, max(len(path) - reservation.first_block, 0) - committed

    async def _own_prefix(self, reservation: Reservation, prefix: Rows, held: list[Hold]) -> Rows:
        """`prefix`, or where it ends with a common block the rows of the namespace itself, which are made if need be
        and whose hold is added to `held`. Fewer where a key is another block's."""
        trie, namespace = reservation.trie, reservation.namespace
        if not len(prefix) or trie.namespace[prefix[-1]] == namespace.ordinal:
            return prefix
        held.append(self._mover.placement.holds.hold(reservation.prefix.owner, trie, prefix[:0]))
        await enter_own(held[-1], namespace, reservation.chain, len(prefix), self._clock())
        return held[-1].rows

    def _enter(self, reservation: Reservation, before: Rows, start: int, end: int) -> tuple[Rows, Rows]:
        """Enters blocks `start` to `end` of a reservation's prompt behind the rows `before`.

        Those before the reservation's first block get a row without bytes. Returns the rows, and those of them that
        lacked a reserved part before.
        """
        trie, chain, namespace = reservation.trie, reservation.chain, reservation.namespace
        keys, tokens = chain.key_rows(start, end), chain.token_rows(start, end)
        parent = int(before[-1]) if len(before) else namespace.root
        rows, _ = trie.insert_path(parent, namespace.ordinal, keys, tokens, self._clock())
        bare = max(reservation.first_block - start, 0)
        return rows, self._fill(reservation, start + bare - reservation.first_block, rows[bare:])

    async def persist(self, trie: Trie, path: Rows) -> int:
        """Returns when the blocks of `path`, from the start of a prompt on, are on disk: their number.

        Raises:
            PreconditionError: there is no disk tier.
            ExhaustedError: the disk tier has no room, for this tenant or for all, or is out of service.
        """
        if self._tiers.durable is None:
            raise PreconditionError("persist without a disk tier; set disk.bytes")
        with self._mover.placement.holds.hold("persist", trie, path):
            await self._make_durable(trie, path)
        return len(path)

    def end(self, reservation: Reservation, at_its_word: bool) -> None:
        """Gives back what a reservation protected; its slots only when nobody can be writing into them any more."""
        sizes = [round_to_slot(reservation.trie.part_bytes[part]) for part in reservation.parts]
        slots = reservation.slots[reservation.slots != NO_SLOT]
        nbytes = len(reservation.slots) * sum(sizes)
        reservation.slots = reservation.slots[:0]
        if at_its_word:
            self._give_back(slots)
        else:
            self.quarantine.keep(reservation, slots, nbytes)
        reservation.prefix.end()

    def _give_back(self, slots: Slots) -> None:
        """Gives slots back to the CPU tier, as many as take a millisecond now, the others soon."""
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
        """Enters the parts of reserved blocks, from the `start`th on, that the CPU tier lacks; which lacked any.

        The other slots stay with the reservation.
        """
        trie, parts = reservation.trie, list(reservation.parts)
        if not len(rows):
            return rows
        reserved = reservation.slots[start : start + len(rows)]
        lacks = trie.slots[rows, self._tiers.shared.level][:, parts] == NO_SLOT
        slots = np.full((len(rows), len(trie.part_bytes)), NO_SLOT, np.int64)
        slots[:, parts] = np.where(lacks, reserved, NO_SLOT)
        new = lacks.any(axis=1)
        self._mover.placement.put(trie, rows[new], self._tiers.shared, slots[new])
        reservation.slots[start : start + len(rows)] = np.where(lacks, NO_SLOT, reserved)
        entered: Rows = rows[new]
        return entered

    async def _make_durable(self, trie: Trie, path: Rows) -> None:
        durable = self._tiers.durable
        if durable is None:
            return
        needed = trie.needed(len(path))
        for source in reversed(self._tiers.memories):  # what a file can be written from first
            if self._tiers.exists(source):
                todo = path[(trie.lacking(path, durable.level, needed) & trie.there[path, source.level]) != 0]
                with self._mover.placement.holds.hold("durable commit", trie, todo, source):
                    await self._mover.write(trie, todo, source)
        torn = int(np.count_nonzero(needed & ~trie.available[path]))
        if torn:
            raise PreconditionError(
                f"{torn} of the blocks lack parts that others have yet to commit, so they cannot be durable; what was "
                "committed is kept - ask for durable in the commit that completes them"
            )
        if (lacking := trie.lacking(path, durable.level, needed)).any():
            self._refuse_durable(trie, path, lacking, durable)

    def _refuse_durable(self, trie: Trie, path: Rows, lacking: GroupMask, durable: StoreTier) -> None:
        """Raises the ExhaustedError that says why a cached prefix is not on disk. `lacking`: [len(path)] KV groups."""
        use, missing = self._mover.use, path[lacking != 0]
        what = f"{len(path)} blocks of the prompt are cached, but {len(missing)} of them are not on disk"
        tier = f"the disk tier ({durable.capacity_bytes} bytes) has no room for them"
        if trouble := self._tiers.trouble(durable):
            raise ExhaustedError(f"{what}: {tier}: {trouble}")
        owner, mine = use.places_by_owner(trie, missing)[0]
        block_bytes = use.footprint(durable, trie.part_bytes)
        room = use.room(owner, durable)
        if room is not None and room < use.group_bytes(trie, durable)[lacking[lacking != 0][mine]].sum():
            used = use.used_bytes(owner, durable)
            raise owner.refusal(
                "disk_most",
                f"{what}: it has {used} of {used + room} bytes of the disk tier, and none of its other blocks there "
                "may be evicted",
                "make a shorter prefix durable, or have others of its prefixes unpinned",
            )
        kept = use.kept_from(owner, durable)
        if kept and len(path) * block_bytes <= durable.capacity_bytes:
            owner.refused["disk_guaranteed"] += 1
            raise ExhaustedError(
                f"tenant {owner.name}: {what}: {tier}, and {kept} bytes of it are pinned by, or guaranteed to, others "
                f"({use.guaranteed(owner, durable)} guaranteed to {owner.name}, limit "
                f"tenants.{owner.name}.disk_guaranteed); make a shorter prefix durable, or have the operator unpin "
                "prefixes of others, lower their guarantees (`prefixd tenants set`) or raise disk.bytes"
            )
        pinned_here = int(np.count_nonzero(trie.pinned[path])) * block_bytes
        pinned = "unpin other prefixes or " if use.held_bytes(owner, durable) > pinned_here else ""
        raise ExhaustedError(f"{what}: {tier}; {pinned}raise disk.bytes")


def present(trie: Trie, path: Rows, parts: Sequence[int], first_block: int, level: int) -> int:
    """The longest beginning of a prompt, in blocks, that has at least `parts` of every block that the rules need.

    A part counts that is in the tier of that `level` already, though other ranks have yet to commit theirs. What only a
    shared store has does not count: it is farther away than what the writer has at hand. Of the
    blocks before `first_block` only those groups count that every longer prefix needs; where there is no such group,
    neither do they need a row.

    Args:
        trie: the prompt's trie.
        path: rows of the prompt's first blocks, as far as there are any.
        parts: the parts that are asked about.
        first_block: the writer has bytes from this block on.
        level: the shared tier's.
    """
    lasting = any(group.rule.lasting for group in trie.groups)
    available = np.zeros(len(path) if lasting else max(len(path), first_block), np.uint8)
    available[: len(path)] = trie.available_here(path)
    for group in trie.groups:
        if not group.rule.lasting:
            available[:first_block] |= np.uint8(group.mask)
    if len(parts) < len(trie.part_bytes):
        has = trie.slots[path, level] != NO_SLOT
        has[:, [part for part in range(len(trie.part_bytes)) if part not in parts]] = True
        for group in trie.groups:
            available[: len(path)] |= np.uint8(group.mask) * has[:, list(group.parts)].all(axis=1)
    return longest_stored(trie.groups, available)
