"""How engines fill blocks: slots reserved, committed, and made durable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from prefixd.cache.index.keys import BlockChain
from prefixd.cache.index.trie import CPU, DISK, GPU, NO_SLOT, NONE, Rows, Trie
from prefixd.cache.mover import Mover
from prefixd.cache.namespaces import Namespace
from prefixd.cache.quarantine import Quarantine
from prefixd.cache.sessions import LeaseTable, Reservation, Session
from prefixd.cache.tiers import Tiers
from prefixd.errors import ExhaustedError, InvalidArgumentError, PreconditionError
from prefixd_swap import round_to_slot


class Reservations:
    """Reservations, from the free slots to the durable blocks.

    Args:
        tiers: the memory.
        mover: makes room and copies.
        leases: whom a reservation belongs to.
        clock: seconds, monotonic.
    """

    def __init__(self, tiers: Tiers, mover: Mover, leases: LeaseTable, clock: Callable[[], float]) -> None:
        self._tiers = tiers
        self._mover = mover
        self._leases = leases
        self._clock = clock
        self.quarantine = Quarantine(partial(tiers.release, CPU))

    async def reserve(
        self,
        session: Session,
        namespace: Namespace,
        chain: BlockChain,
        trie: Trie,
        parts: tuple[int, ...],
        ttl_s: float,
        by_daemon: bool,
    ) -> Reservation | int:
        """See `TieredCache.reserve`; the arguments are checked."""
        prefix = _present(trie, namespace, chain, parts)
        wanted = len(chain) - len(prefix)
        if not wanted:
            return len(chain)
        trie.retain(prefix)
        sizes = [trie.part_bytes[part] for part in parts]
        try:
            slots = await self._mover.take(CPU, sizes, wanted)
        except BaseException:
            self._unretain(trie, prefix)
            raise
        if not slots:
            self._unretain(trie, prefix)
            waiting = self.quarantine.nbytes
            kept = f" ({waiting} bytes wait for silent clients to release or end)" if waiting else ""
            raise ExhaustedError(
                f"the CPU tier ({self._tiers.arena.capacity_bytes} bytes) has no room for a block of {sum(sizes)} "
                f"bytes and nothing in it may be evicted{kept}; release leases or raise cpu.bytes"
            )
        expires_s = self._clock() + ttl_s
        reservation = Reservation(
            self._leases.next_id(),
            session,
            namespace,
            trie,
            chain,
            prefix,
            len(prefix),
            parts,
            slots,
            expires_s,
            by_daemon,
        )
        self._leases.grant(reservation)
        return reservation

    async def commit(self, reservation: Reservation, blocks: int, durable: bool) -> tuple[int, int]:
        """See `TieredCache.commit`."""
        self._leases.find(reservation.session, reservation.id)  # it may have expired while it was filled
        if not 0 <= blocks <= len(reservation.slots):
            raise InvalidArgumentError(
                f"commit of {blocks} blocks, but reservation {reservation.id} has {len(reservation.slots)}; "
                "commit only what was reserved"
            )
        if durable and self._tiers.disk is None:
            raise PreconditionError("durable commit without a disk tier; set disk.bytes or commit without durable")
        self._leases.settle(reservation, "it was committed")
        trie, namespace, chain = reservation.trie, reservation.namespace, reservation.chain
        parent = int(reservation.prefix[-1]) if len(reservation.prefix) else namespace.root
        rows: list[int] = []
        committed = 0
        now = self._clock()
        for i in range(blocks):
            block = reservation.first_block + i
            row = trie.insert(parent, namespace.ordinal, chain.key(block), chain.block(block), now)
            if row is None:  # the key is another block's
                self._mover.lost["key collision"] += blocks - i
                break
            committed += self._fill(reservation, i, row)
            rows.append(row)
            parent = row
        done = np.array(rows, np.int64)
        trie.touch(done, now)
        path = np.concatenate([reservation.prefix, done])
        trie.retain(path)
        self.end(reservation, True)
        self._mover.seal(trie, done)
        self._mover.changed.set()
        try:
            if durable:
                await self._make_durable(trie, path)
        finally:
            self._unretain(trie, path)
        return committed, len(rows) - committed

    async def persist(self, trie: Trie, path: Rows) -> int:
        """Returns when the blocks of `path`, from the start of a prompt on, are on disk: their number.

        Raises:
            PreconditionError: there is no disk tier.
            ExhaustedError: the disk tier has no room, or is out of service.
        """
        if self._tiers.disk is None:
            raise PreconditionError("persist without a disk tier; set disk.bytes")
        trie.retain(path)
        try:
            await self._make_durable(trie, path)
        finally:
            self._unretain(trie, path)
        return len(path)

    def end(self, reservation: Reservation, at_its_word: bool) -> None:
        """Gives back what a reservation protected; its slots only when nobody can be writing into them any more."""
        sizes = [round_to_slot(reservation.trie.part_bytes[part]) for part in reservation.parts]
        slots = [slot for block in reservation.slots for slot in block]
        nbytes = len(reservation.slots) * sum(sizes)
        reservation.slots = []
        if at_its_word:
            self._tiers.release(CPU, slots)
        else:
            self.quarantine.keep(reservation, slots, nbytes)
        self._unretain(reservation.trie, reservation.prefix)

    def _fill(self, reservation: Reservation, index: int, row: int) -> bool:
        """Enters the parts of a reserved block that the CPU tier lacks; False when it lacks none."""
        trie = reservation.trie
        slots = [NO_SLOT] * len(trie.part_bytes)
        spare: list[int] = []
        for part, slot in zip(reservation.parts, reservation.slots[index], strict=True):
            if trie.slots[row, CPU, part] == NO_SLOT:
                slots[part] = slot
            else:
                spare.append(slot)
        if len(spare) == len(reservation.parts):
            return False
        self._mover.put(trie, row, CPU, slots)
        reservation.slots[index] = spare
        return True

    async def _make_durable(self, trie: Trie, path: Rows) -> None:
        for source in (CPU, GPU):
            if self._tiers.exists(source):
                todo = trie.missing(path, DISK)
                todo = todo[(trie.whole[todo] & (1 << source)) != 0]
                trie.hold(todo, source)
                try:
                    await self._mover.write(trie, todo, source)
                finally:
                    trie.unhold(todo, source)
        torn = int((trie.whole[path] == 0).sum())
        if torn:
            raise PreconditionError(
                f"{torn} of the blocks lack parts that others have yet to commit, so they cannot be durable; what was "
                "committed is kept - ask for durable in the commit that completes them"
            )
        if len(trie.missing(path, DISK)):
            trouble = self._tiers.trouble[DISK]
            raise ExhaustedError(
                "the blocks are cached, but the disk tier has no room for them"
                + (f": {trouble}" if trouble else "; raise disk.bytes")
            )

    def _unretain(self, trie: Trie, rows: Rows) -> None:
        trie.unretain(rows)
        self._mover.sweep(trie, rows)


def _present(trie: Trie, namespace: Namespace, chain: BlockChain, parts: Sequence[int]) -> Rows:
    """The prefix that has at least `parts` somewhere."""
    if len(parts) == len(trie.part_bytes):
        return trie.match(namespace.root, chain).rows
    found: list[int] = []
    parent = namespace.root
    for block in range(len(chain)):
        row = trie.find(chain.key(block))
        if row is None or trie.parent[row] != parent or trie.tokens[row].tobytes() != chain.block(block):
            break
        if trie.nearest[row] == NONE and (trie.slots[row, CPU, list(parts)] < 0).any():
            break
        found.append(row)
        parent = row
    return np.array(found, np.int64)
