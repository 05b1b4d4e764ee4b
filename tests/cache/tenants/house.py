"""A cache of several tenants, whose engines compute the same bytes from the same tokens, but for liars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from prefixd.cache import BlockChain, Lease, Namespace, NamespaceSpec, PartSpec, Trie
from tests.rig import BLOCK_TOKENS, PART_BYTES, Rig

K = 3
TENANTS = ("a", "b", "c", "d")
FULL = PartSpec("kv", 0, PART_BYTES)


class House(Rig):
    """A cache where blocks become common after `K` tenants.

    Attributes:
        liars: tenants whose engines compute other bytes, each its own.
        homes: their namespaces, which stay known.
    """

    def __init__(self, path: Path, *, parts: tuple[PartSpec, ...] = (FULL,), worker: bool = False, **how: Any) -> None:
        self.parts = parts
        self.worker = worker
        self.liars: set[str] = set()
        self.homes: dict[str, Namespace] = {}
        super().__init__(path, **{"share_after": K, **how})

    def home(self, tenant: str, salt: bytes = b"") -> Namespace:
        """A tenant's namespace."""
        spec = NamespaceSpec("model", BLOCK_TOKENS, self.parts, salt, tenant=tenant, worker=self.worker)
        home = self.homes[tenant] = self.cache.register(spec)
        return home

    def act_for(self, namespace: Namespace | None) -> None:
        """What is done next is done in a session of the namespace's tenant."""
        tenant = self.cache.tenants.known((namespace or self.namespace).spec.tenant)
        mine = [session for session in self.cache.leases.sessions.values() if session.tenant is tenant]
        self.session = mine[0] if mine else self.cache.leases.open("test", 1, self.clock(), tenant)

    async def put(self, prompt: Sequence[int], *, namespace: Namespace | None = None, **how: Any) -> tuple[int, int]:
        self.act_for(namespace)
        return await super().put(prompt, namespace=namespace, **how)

    async def lease(self, prompt: Sequence[int], *, namespace: Namespace | None = None, **how: Any) -> Lease | None:
        self.act_for(namespace)
        return await super().lease(prompt, namespace=namespace, **how)

    def content(self, namespace: Namespace, chain: BlockChain, block: int, part: int = 0) -> bytes:
        lie = namespace.spec.tenant if namespace.spec.tenant in self.liars else ""
        seed = xxhash.xxh3_64_intdigest(lie.encode() + chain.blocks(block + 1), part)
        return np.random.default_rng(seed).bytes(namespace.spec.parts[part].nbytes)

    async def put_for(self, tenant: str, prompt: Sequence[int]) -> int:
        """A tenant computes what it lacks of a prompt and stores it, and that is counted; how many blocks."""
        committed, duplicates = await self.put(prompt, namespace=self.home(tenant))
        assert not duplicates
        await self.settle()
        return committed

    async def settle(self) -> None:
        """What was stored has been counted, and what is to become common is."""
        if self.cache.common is not None:
            await self.cache.common.work()
        await self.cache.mover.checksums.wait_for_all()
        self.check()

    async def has(self, tenant: str, prompt: Sequence[int]) -> int:
        """How many blocks of a prompt a tenant can read, every byte checked."""
        found = await self.get(prompt, namespace=self.home(tenant))
        match = await self.cache.match(self.home(tenant), self.chain(prompt, self.home(tenant)))
        assert len(match) == found
        return found

    def copies(self, prompt: Sequence[int], tier: int) -> int:
        """Copies of a prompt's last block in a tier, of all namespaces."""
        key = self.chain(prompt, self.home("a")).key(len(prompt) - 1)
        homes = [self.home(tenant).ordinal for tenant in TENANTS] + [self.common.ordinal]
        rows = [row for home in homes if (row := self.trie.find(home, key)) is not None]
        return sum(bool(self.trie.any_part[row] & 1 << tier) for row in rows)

    @property
    def trie(self) -> Trie:
        return self.cache.trie(self.home("a"))

    @property
    def common(self) -> Namespace:
        common = self.home("a").common
        assert common is not None
        return common
