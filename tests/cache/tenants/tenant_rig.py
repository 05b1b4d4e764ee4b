"""Tenants on a small cache: each with a namespace and a session of its own."""

from __future__ import annotations

from collections.abc import Sequence

from prefixd.base.tenancy.tenants import Quota, Tenant, TierQuota
from prefixd.cache import Lease, Namespace, NamespaceSpec, PartSpec, Reservation, Session
from prefixd_swap.tiers import Tier
from tests.rig import Rig

TierBlocks = dict[int, tuple[int, int | None]]
"""By level, the blocks that a tenant is guaranteed, and the most that it may have."""


class Home:
    """One tenant: what it does in a cache, in blocks of one size.

    Args:
        rig: the cache.
        name: the tenant's.
        tiers: its quotas, in blocks of `rig.part_bytes`.
        nbytes: of its blocks; those of the rig by default.
    """

    def __init__(self, rig: Rig, name: str, tiers: TierBlocks | None = None, nbytes: int | None = None) -> None:
        self.rig = rig
        self.tenant: Tenant = rig.cache.tenants.known(name)
        part = PartSpec("kv", 0, nbytes or rig.part_bytes)
        self.namespace: Namespace = rig.cache.register(NamespaceSpec("model", 2, (part,), tenant=name))
        self.session: Session = rig.cache.leases.open(name, 1, rig.clock(), self.tenant)
        self.limit(tiers or {})

    def limit(self, tiers: TierBlocks) -> None:
        """Gives the tenant other quotas."""
        size = self.rig.part_bytes
        quotas = [TierQuota()] * 3
        for level, (guaranteed, most) in tiers.items():
            quotas[level] = TierQuota(guaranteed * size, None if most is None else most * size)
        self.tenant.quota = Quota(tiers=tuple(quotas))

    async def put(self, prompt: Sequence[int], *, durable: bool = False) -> tuple[int, int]:
        """See `Rig.put`."""
        self.rig.session = self.session
        return await self.rig.put(prompt, namespace=self.namespace, durable=durable)

    async def reserve(self, prompt: Sequence[int]) -> Reservation:
        """Slots for blocks that are not cached."""
        chain = self.rig.chain(prompt, self.namespace)
        reservation = await self.rig.cache.reserve(self.session, self.namespace, chain)
        assert isinstance(reservation, Reservation)
        return reservation

    async def lease(self, prompt: Sequence[int]) -> Lease | None:
        """See `Rig.lease`."""
        self.rig.session = self.session
        return await self.rig.lease(prompt, namespace=self.namespace)

    def release(self, grant: Lease | Reservation | None) -> None:
        """Ends a grant."""
        assert grant is not None
        self.rig.cache.release(self.session, grant.id)

    def has(self, prompt: Sequence[int], level: int) -> int:
        """How many of the prompt's blocks, from the first on, are in the tier."""
        trie = self.rig.cache.trie(self.namespace)
        there = [trie.has(row, level) for row in self.rig.rows(prompt, self.namespace)]
        return len(there) if all(there) else there.index(False)

    def used(self, tier: Tier) -> int:
        """Blocks' worth of bytes that it has of a tier."""
        return self.rig.cache.mover.use.used_bytes(self.tenant, tier) // self.rig.part_bytes

    def held(self, tier: Tier) -> int:
        """Of these, what it holds."""
        return self.rig.cache.mover.use.held_bytes(self.tenant, tier) // self.rig.part_bytes
