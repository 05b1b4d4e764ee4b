"""Bytes of cached blocks that somebody outside keeps where they are: by leases, runs and pins, each byte once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from prefixd.cache.groups import GroupMask
from prefixd.cache.index.columns import ColumnMemory
from prefixd.cache.index.trie import Rows, Trie
from prefixd.tenants import Tenant
from prefixd_swap.tiers import Int64s, Tier

if TYPE_CHECKING:
    from prefixd.cache.tenant_use import TenantUse

Holders = npt.NDArray[np.int32]


class HeldBytes:
    """Counts, by tenant and tier, the bytes of blocks that have a holder. A block may have many; it counts once.

    Args:
        use: knows whose blocks are whose, and their sizes.
    """

    def __init__(self, use: TenantUse) -> None:
        self._use = use
        self._memory: dict[tuple[int, int], ColumnMemory] = {}
        self._holders: dict[tuple[int, int], Holders] = {}  # by trie and level: [rows, groups]
        self._nbytes: dict[tuple[int, int], int] = {}  # by tenant and level

    def nbytes(self, tenant: Tenant, tier: Tier) -> int:
        """Bytes held of a tenant's blocks in a tier."""
        return self._nbytes.get((tenant.ordinal, tier.level), 0)

    def holders(self, trie: Trie, tier: Tier) -> Holders:
        """[rows, groups]: how many hold the bytes of a KV group of each block."""
        place = trie.ordinal, tier.level
        holders = self._holders.get(place)
        if holders is None or holders.shape[1] != len(trie.groups):  # a trie can get another geometry
            self._memory[place], holders = ColumnMemory(), np.zeros((0, len(trie.groups)), np.int32)
        if len(holders) < max(trie.rows, 1):
            holders = self._holders[place] = self._memory[place].grown("holders", holders, len(trie.namespace))
        return holders

    def change(self, trie: Trie, tier: Tier, rows: Rows, wanted: GroupMask | None, *, begin: bool) -> None:
        """The `wanted` groups of different blocks, all by default, have one holder more, or fewer."""
        for tenant, mine in self._use.places_by_owner(trie, rows):
            self._change_of(tenant, trie, tier, rows[mine], None if wanted is None else wanted[mine], begin=begin)

    def _change_of(
        self, tenant: Tenant, trie: Trie, tier: Tier, rows: Rows, wanted: GroupMask | None, *, begin: bool
    ) -> None:
        """As `change`, blocks of one tenant."""
        holders, nbytes, by = self.holders(trie, tier), 0, 1 if begin else -1
        for group in trie.groups:
            chosen = rows if wanted is None else rows[(wanted & np.uint8(group.mask)) != 0]
            holders[chosen, group.bit] += by
            changed = int(np.count_nonzero(holders[chosen, group.bit] == begin))
            nbytes += by * changed * int(self._use.group_bytes(trie, tier)[group.mask])
        place = tenant.ordinal, tier.level
        self._nbytes[place] = self._nbytes.get(place, 0) + nbytes

    def fresh_bytes(self, trie: Trie, tier: Tier, rows: Rows, wanted: GroupMask | None) -> Int64s:
        """[len(rows)]: bytes of the `wanted` groups of each block that nobody holds yet."""
        holders = self.holders(trie, tier)[rows]
        lacking = np.zeros(len(rows), np.uint8)
        for group in trie.groups:
            lacking |= np.where(holders[:, group.bit] == 0, np.uint8(group.mask), np.uint8(0))
        fresh: Int64s = self._use.group_bytes(trie, tier)[lacking if wanted is None else lacking & wanted]
        return fresh
