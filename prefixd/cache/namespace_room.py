"""Limits the memory of namespaces: beyond it, the least recently used ones are forgotten with their blocks.

A namespace is in use while blocks of it are held or pinned, while a request or a call has a reference to it, and while
a session has it open whose client would not open it again (`Session.reopens`). All others may be forgotten, first those
of tenants with more than their share, so a tenant within its share loses none to another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from prefixd.base.errors import ExhaustedError
from prefixd.base.long_work.pacer import give_way
from prefixd.base.tenancy.tenants import COMMON, Tenant, Tenants
from prefixd.cache.background.forgetting import FoundBlocks, find_namespaces, forget
from prefixd.cache.index.scan import slices
from prefixd.cache.index.trie import Trie
from prefixd.cache.moving.mover import Mover
from prefixd.cache.namespaces import NamespaceRegistry
from prefixd.cache.sessions.lease_table import LeaseTable
from prefixd.cache.tries import Tries
from prefixd.cache.troubles import Troubles
from prefixd.observability.eviction_journal import Reason
from prefixd_swap import StorageError

log = logging.getLogger(__name__)

PART = "namespaces"
"""The part in `Troubles` when a namespace is refused."""
_KEPT_BYTES = 32 << 10  # kept free for each tenant: some ten namespaces
_FORGOTTEN_AT_ONCE = 16  # a sixteenth of a tenant's namespaces, since each step scans all blocks
_IN_ONE_TURN = 32  # namespaces; each is searched in all sessions
_VAIN_S = 1.0  # time before the next attempt, after all namespaces of a tenant were in use


class NamespaceRoom:
    """Limits the memory of a registry.

    Args:
        registry: all namespaces.
        tenants: their owners.
        leases: the sessions that have them open.
        mover: forgets blocks.
        tries: the tries of their blocks.
        troubles: gets a trouble when a namespace is refused.
        clock: seconds.
        limit_bytes: the most memory of all namespaces.
    """

    def __init__(
        self,
        registry: NamespaceRegistry,
        tenants: Tenants,
        leases: LeaseTable,
        mover: Mover,
        tries: Tries,
        troubles: Troubles,
        clock: Callable[[], float],
        limit_bytes: int,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.forgotten = 0
        """Namespaces that were forgotten to make room."""
        self.refused = 0
        """Registrations that were refused because all namespaces were in use."""
        self._registry = registry
        self._tenants = tenants
        self._leases = leases
        self._mover = mover
        self._trie_of = tries.by_namespace
        self.on_forgotten: Callable[[int, bytes], None] = lambda ordinal, identity: None
        """Called with the ordinal and the id of each forgotten namespace."""
        self._troubles = troubles
        self._clock = clock
        self._making = asyncio.Lock()
        self._vain_until_s: dict[Tenant, float] = {}
        self._refused_last: tuple[Tenant, int] | None = None

    def fits(self, tenant: Tenant, nbytes: int) -> bool:
        """Whether a tenant may have one more namespace of `nbytes` bytes; some memory is kept for other tenants."""
        return not self._has_all(tenant) and self._has_memory(tenant, nbytes)

    def _has_all(self, tenant: Tenant) -> bool:
        """Whether a tenant has as many namespaces as its quota allows."""
        most = tenant.quota.namespaces
        return most is not None and self._registry.count(tenant.name) >= most

    def _has_memory(self, tenant: Tenant, nbytes: int) -> bool:
        each = min(_KEPT_BYTES, self.limit_bytes // (2 * self._tenants.calling))
        others = (other for other in self._tenants if other is not tenant and other.name != COMMON)
        kept = sum(max(0, each - self._registry.bytes_of(other.name)) for other in others)
        return self._registry.nbytes + nbytes + kept <= self.limit_bytes

    def check(self, tenant: Tenant, nbytes: int) -> None:
        """Raises ExhaustedError unless it fits. If all tenants together are at the limit, also begins a trouble."""
        have = self._registry.count(tenant.name)
        tenant.check("namespaces", have, "namespaces are in use", "use one of them")
        if self.fits(tenant, nbytes):
            self._end_trouble()
            return
        self.refused += 1
        tenant.refused["namespaces"] += 1
        self._refused_last = tenant, nbytes
        there = (
            f"{self._registry.counted} namespaces take {self._registry.nbytes} bytes of memory and are in use, one "
            f"more takes {nbytes}, and all tenants together may have {self.limit_bytes}, some of which are kept for "
            "each (limit server.namespace_bytes)"
        )
        self._troubles.begin(
            PART,
            f"requests of tenant {tenant.name} run without the cache: {there}; raise server.namespace_bytes, or have "
            "clients end leases and sessions, and operators unpin",
        )
        raise ExhaustedError(f"tenant {tenant.name}: {there}; use one of them, or have the operator raise it")

    def check_trouble(self) -> None:
        """Ends the trouble if the namespace that was refused last would fit now."""
        if self._refused_last is not None and self.fits(*self._refused_last):
            self._end_trouble()

    async def make(self, tenant: Tenant, nbytes: int) -> None:
        """Forgets namespaces until a tenant may have one more of `nbytes` bytes, or all that are left are in use."""
        if not self.fits(tenant, nbytes):
            await self._forget_until(
                lambda: self.fits(tenant, nbytes),
                lambda: [tenant] if self._has_all(tenant) else self._victims(tenant, nbytes),
            )

    async def trim(self) -> None:
        """Forgets namespaces until those restored from disk are within the limit, which may have been lowered.

        Ignores quotas, since no new namespace is registered.
        """
        tenant = self._tenants.default
        if not self._has_memory(tenant, 0):
            await self._forget_until(lambda: self._has_memory(tenant, 0), lambda: self._victims(tenant, 0))

    async def _forget_until(self, enough: Callable[[], bool], victims: Callable[[], list[Tenant]]) -> None:
        async with self._making:
            for victim in victims():
                if self._clock() < self._vain_until_s.get(victim, 0.0):
                    continue
                left, found = self._registry.count(victim.name), 0
                step = max(1, left // _FORGOTTEN_AT_ONCE)
                while left > 0:
                    if enough():
                        return
                    # Read again each time: others were used meanwhile. Namespaces in use were moved to the end.
                    found += await self._forget(self._registry.oldest(victim.name, min(step, left)))
                    left -= step
                if not found:
                    self._vain_until_s[victim] = self._clock() + _VAIN_S

    def _end_trouble(self) -> None:
        self._refused_last = None
        if PART in self._troubles:
            self._troubles.end(PART)

    def _victims(self, tenant: Tenant, nbytes: int) -> list[Tenant]:
        """The tenants that lose namespaces, in order."""
        use = self._registry.bytes_of
        owners = self._tenants.calling + bool(use(COMMON))
        share, own = self.limit_bytes // owners, use(tenant.name) + nbytes
        over = [other for other in self._tenants if other is not tenant and use(other.name) > max(share, own)]
        over.sort(key=lambda other: -use(other.name))
        if own > share:
            return [tenant, *over]
        beyond = [other for other in self._tenants if other is not tenant and share < use(other.name) <= own]
        return [*over, *beyond, tenant]

    async def _forget(self, namespaces: Sequence[tuple[int, bytes]]) -> int:
        """Forgets those of `namespaces`, ordinals and ids, that are not in use; returns how many."""
        before, with_blocks = self.forgotten, defaultdict[int, dict[int, bytes]](dict)
        for number, (ordinal, identity) in enumerate(namespaces):
            if number % _IN_ONE_TURN == _IN_ONE_TURN - 1:
                await give_way()
            if not self._has(ordinal, identity) or not self._close(ordinal):
                continue
            trie = self._trie_of[ordinal]
            if trie.blocks_of(ordinal):
                with_blocks[trie.ordinal][ordinal] = identity
            else:
                self._drop(ordinal)
        for of_trie in with_blocks.values():
            await self._forget_blocks(self._trie_of[next(iter(of_trie))], of_trie)
        return self.forgotten - before

    def _close(self, ordinal: int) -> bool:
        """Closes a namespace in all sessions if it has no other use; returns whether it did."""
        namespace = self._registry.at(ordinal)
        identity = namespace.id
        having = [each for each in self._leases.sessions.values() if identity in each.namespaces]
        if not all(session.reopens for session in having):
            self._registry.touch(namespace)
            return False
        for session in having:
            del session.namespaces[identity]
        del namespace
        if self._registry.is_used(ordinal):
            used = self._registry.at(ordinal)
            for session in having:
                session.namespaces[identity] = used
            self._registry.touch(used)
            return False
        return True

    async def _forget_blocks(self, trie: Trie, identities: dict[int, bytes]) -> None:
        """Forgets namespaces of one trie with their blocks, except those with held or pinned blocks."""
        found = await find_namespaces(trie, identities)
        in_use = await self._in_use(found)
        for ordinal in in_use & identities.keys():
            self._registry.touch(self._registry.at(ordinal))
        going = [
            ordinal
            for ordinal, identity in identities.items()
            if ordinal not in in_use and self._has(ordinal, identity) and not self._registry.is_used(ordinal)
        ]
        try:
            async for _ in forget(self._mover, await found.of(going), reason=Reason.NAMESPACES):
                pass
        except StorageError as error:  # they are gone from memory, but return at the next start
            log.warning("namespaces are forgotten, but their blocks are still on disk: %s", error)
        for ordinal in going:
            if self._has(ordinal, identities[ordinal]) and not trie.blocks_of(ordinal):
                self._drop(ordinal)

    async def _in_use(self, found: FoundBlocks) -> set[int]:
        """The ordinals of namespaces with held or pinned blocks."""
        trie, in_use = found.trie, set[int]()
        for part in slices(len(found)):
            rows = found.rows[part]
            same = trie.generation[rows] == found.generations[part]
            kept = rows[same & ((trie.keep[rows] > 0) | trie.pinned[rows])]
            in_use.update(np.unique(trie.namespace[kept]).tolist())
            await give_way()
        return in_use

    def _has(self, ordinal: int, identity: bytes) -> bool:
        namespace = self._registry.find_at(ordinal)
        return namespace is not None and namespace.id == identity

    def _drop(self, ordinal: int) -> None:
        """Forgets a namespace without blocks, unless it is used again."""
        identity = self._registry.forget(ordinal)
        if identity is not None:
            self.forgotten += 1
            self.on_forgotten(ordinal, identity)
