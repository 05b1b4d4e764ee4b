"""Counts the bytes that each tenant has in each tier, and applies its quotas.

    the bytes of a tenant in a tier
    |<------- cached: slots in the tries ------->|<--- granted --->|<- moving ->|
             |<-- held: leased, in use -->|      reserved, of runs    copies under way
                                                 or in quarantine

The quota `most` limits all of them; it is checked before an allocation. Other tenants cannot evict the bytes that are
*guaranteed* to a tenant, only those beyond (`losses`). A tenant may not use its guarantee yet, so the bytes that
tenants hold for as long as they like (granted or held) are limited too: they leave room for the guarantees of all other
tenants (`room_to_hold`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.steps import Steps
from prefixd.base.tenancy.tenants import Tenant, Tenants
from prefixd.base.tiers import QUOTA_TIERS
from prefixd.cache.index.columns import ColumnMemory
from prefixd.cache.index.scan import slices
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.namespaces import Namespace
from prefixd.cache.placement.stored_bytes import StoredBytes
from prefixd.cache.rules import GroupMask
from prefixd.cache.tiers import Slots, Tiers
from prefixd_swap import round_to_slot
from prefixd_swap.tiers import Account, Int64s, MemoryTier, Tier

Holders = npt.NDArray[np.int32]


class HeldBytes:
    """Counts, by tenant and tier, the bytes of blocks that are held. A block counts once, however many hold it.

    Args:
        use: knows the owners and the sizes of blocks.
    """

    def __init__(self, use: TenantUse) -> None:
        self._use = use
        self._memory: dict[tuple[int, int], ColumnMemory] = {}
        self._holders: dict[tuple[int, int], Holders] = {}  # by trie and level: [rows, groups]
        self._nbytes: dict[tuple[int, int], int] = {}  # by tenant and level

    def nbytes(self, tenant: Tenant, tier: Tier) -> int:
        """Bytes of a tenant's blocks that are held in a tier."""
        return self._nbytes.get((tenant.ordinal, tier.level), 0)

    def holders(self, trie: Trie, tier: Tier) -> Holders:
        """[rows, groups]: the number of holds on the bytes of each KV group of each block."""
        place = trie.ordinal, tier.level
        holders = self._holders.get(place)
        if holders is None or holders.shape[1] != len(trie.groups):  # a trie can get another geometry
            self._memory[place], holders = ColumnMemory(), np.zeros((0, len(trie.groups)), np.int32)
        if len(holders) < max(trie.rows, 1):
            holders = self._holders[place] = self._memory[place].grown("holders", holders, len(trie.namespace))
        return holders

    def change(self, trie: Trie, tier: Tier, rows: Rows, wanted: GroupMask | None, *, begin: bool) -> None:
        """Counts one hold more (`begin`) or fewer on the `wanted` groups, all by default, of different blocks."""
        for tenant, mine in self._use.places_by_owner(trie, rows):
            self._change_tenant(tenant, trie, tier, rows[mine], None if wanted is None else wanted[mine], begin=begin)

    def _change_tenant(
        self, tenant: Tenant, trie: Trie, tier: Tier, rows: Rows, wanted: GroupMask | None, *, begin: bool
    ) -> None:
        holders, nbytes, by = self.holders(trie, tier), 0, 1 if begin else -1
        for group in trie.groups:
            chosen = rows if wanted is None else rows[(wanted & np.uint8(group.mask)) != 0]
            holders[chosen, group.bit] += by
            changed = int(np.count_nonzero(holders[chosen, group.bit] == begin))
            nbytes += by * changed * int(self._use.group_bytes(trie, tier)[group.mask])
        place = tenant.ordinal, tier.level
        self._nbytes[place] = self._nbytes.get(place, 0) + nbytes

    def fresh_bytes(self, trie: Trie, tier: Tier, rows: Rows, wanted: GroupMask | None) -> Int64s:
        """[len(rows)]: bytes of the `wanted` groups of each block that are not held yet."""
        holders = self.holders(trie, tier)[rows]
        lacking = np.zeros(len(rows), np.uint8)
        for group in trie.groups:
            lacking |= np.where(holders[:, group.bit] == 0, np.uint8(group.mask), np.uint8(0))
        fresh: Int64s = self._use.group_bytes(trie, tier)[lacking if wanted is None else lacking & wanted]
        return fresh


_NO_LIMIT = np.int64(1 << 62)


class Losses:
    """The bytes that each tenant may lose in a tier when room is made for one tenant; `take` subtracts from them.

    Args:
        use: knows the owners of blocks.
        tier: the tier.
        left: [tenants + 1] bytes; below 0: not even a record without bytes. The last one is for tenants that are new
            since.
        wanted: no tenant loses more once this many bytes have gone; None: no such limit.
    """

    def __init__(self, use: TenantUse, tier: Tier, left: Int64s, wanted: int | None = None) -> None:
        self._use = use
        self._tier = tier
        self.left = left
        self.wanted = wanted

    def owners(self, trie: Trie, rows: Rows) -> Rows:
        """[len(rows)]: the index in `left` of each block's tenant."""
        return np.minimum(self._use.owners(trie, rows), len(self.left) - 1)

    def bytes_of(self, trie: Trie, rows: Rows) -> Int64s:
        """[len(rows)]: bytes of each block in the tier."""
        return self._use.bytes_of(trie, rows, self._tier)

    def cost(self, trie: Trie, row: int) -> tuple[int, int]:
        """The owner and the bytes of one block, as `owners` and `bytes_of`, in half the time."""
        return min(self._use.owner_number(trie, row), len(self.left) - 1), self._use.bytes_of_row(trie, row, self._tier)

    def may_go(self, trie: Trie, rows: Rows) -> npt.NDArray[np.bool_]:
        """[len(rows)]: which blocks may lose their copies, each considered alone."""
        left = self.left[self.owners(trie, rows)]
        may_go: npt.NDArray[np.bool_] = left >= int(self._use.part_bytes(trie, self._tier).sum())
        close = np.flatnonzero(~may_go & (left >= 0))
        may_go[close] = self.bytes_of(trie, rows[close]) <= left[close]
        return may_go

    def take(self, trie: Trie, rows: Rows) -> bool:
        """Whether all of these blocks may lose their copies after those taken before; takes them if so."""
        nbytes = np.zeros_like(self.left)
        owners = self.owners(trie, rows)
        np.add.at(nbytes, owners, self.bytes_of(trie, rows))
        if (nbytes > self.left)[owners].any():
            return False
        self.left -= nbytes
        return True

    def first(self, trie: Trie, rows: Rows, groups: GroupMask) -> npt.NDArray[np.bool_]:
        """[len(rows)]: which blocks, taken in order, may lose their bytes of `groups`; takes them."""
        owners, nbytes = self.owners(trie, rows), self._use.bytes_of_groups(trie, rows, groups, self._tier)
        goes = np.ones(len(rows), np.bool_)
        for owner in np.unique(owners).tolist():
            mine = np.flatnonzero(owners == owner)
            lost = np.cumsum(nbytes[mine])
            goes[mine] = (self.left[owner] >= 0) & (lost <= self.left[owner])
            if self.wanted is not None:
                goes[mine] &= lost - nbytes[mine] < self.wanted
                self.wanted -= int(nbytes[mine][goes[mine]].sum())
            self.left[owner] -= int(nbytes[mine][goes[mine]].sum())
        return goes


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Bytes of the slots that a trie's blocks take in a tier: by part, and by mask of KV groups."""

    tier: Tier
    part_bytes: tuple[int, ...]
    parts: Int64s
    groups: Int64s


class TenantUse:
    """The tenants' bytes in the tiers that have quotas.

    Args:
        tiers: the memory.
        tenants: all tenants, with their quotas as of now.
    """

    def __init__(self, tiers: Tiers, tenants: Tenants) -> None:
        self._tiers = tiers
        self.tenants = tenants
        self._owner_of = np.zeros(64, np.int64)  # by namespace, its tenant
        self._cached = np.zeros((1, len(QUOTA_TIERS)), np.int64)  # by tenant and level
        self._leaving = np.zeros_like(self._cached)  # of these, chosen to go and not gone yet
        self._moving: dict[tuple[int, int], Account] = {}
        self._granted: dict[tuple[int, int], Account] = {}
        self._slot_bytes: dict[tuple[int, int], _Sizes] = {}
        self.held = HeldBytes(self)
        self.stored = StoredBytes()
        """What is stored on disk of the tenants' blocks."""
        self._pinned: Counter[int] = Counter()  # by tenant, bytes of pinned blocks

    # -- owners ---------------------------------------------------------------------------------------------------

    def tenant_of(self, namespace: Namespace) -> Tenant:
        """The tenant that a namespace belongs to."""
        return self.tenants.at(int(self._owner_of[namespace.ordinal]))

    def assign(self, namespace: int, tenant: Tenant) -> None:
        """Assigns the namespace with this ordinal, which has no blocks, to a tenant."""
        if namespace >= len(self._owner_of):
            self._owner_of = np.concatenate([self._owner_of, np.zeros(namespace + 1, np.int64)])
        self._owner_of[namespace] = tenant.ordinal

    def owners(self, trie: Trie, rows: Rows) -> Rows:
        """[len(rows)]: the tenants' ordinals."""
        if len(self.tenants.all) == 1:
            return np.zeros(len(rows), np.int64)
        owners: Rows = self._owner_of[trie.namespace[rows]]
        return owners

    def owner_number(self, trie: Trie, row: int) -> int:
        """The ordinal of the tenant that a block belongs to."""
        return 0 if len(self.tenants.all) == 1 else int(self._owner_of[trie.namespace[row]])

    def owner(self, trie: Trie, row: int) -> Tenant:
        """The tenant that a block belongs to."""
        return self.tenants.at(self.owner_number(trie, row))

    def by_owner(self, trie: Trie, rows: Rows) -> list[tuple[Tenant, Rows]]:
        """Each tenant's part of `rows`, in their order."""
        return [(tenant, rows[at]) for tenant, at in self.places_by_owner(trie, rows)]

    def places_by_owner(self, trie: Trie, rows: Rows) -> list[tuple[Tenant, slice | Rows]]:
        """The ascending positions in `rows` of each tenant's blocks."""
        if not len(rows):
            return []
        owners = self.owners(trie, rows)
        first = int(owners[0])
        if (owners == first).all():
            return [(self.tenants.all[first], slice(None))]
        return [(self.tenants.all[owner], np.flatnonzero(owners == owner)) for owner in np.unique(owners).tolist()]

    # -- bytes ----------------------------------------------------------------------------------------------------

    def part_bytes(self, trie: Trie, tier: Tier) -> Int64s:
        """[parts]: bytes of the slot that each part of a block takes in a tier."""
        return self._sizes(trie, tier).parts

    def group_bytes(self, trie: Trie, tier: Tier) -> Int64s:
        """[2 ** groups]: bytes of the slots that the parts of the groups of a mask take in a tier."""
        return self._sizes(trie, tier).groups

    def bytes_of(self, trie: Trie, rows: Rows, tier: Tier) -> Int64s:
        """[len(rows)]: bytes of the slots that blocks have in a tier."""
        return self._slots_bytes(trie, rows, tier, trie.slots[rows, tier.level] != NO_SLOT)

    def bytes_of_row(self, trie: Trie, row: int, tier: Tier) -> int:
        """Bytes of the slots that one block has in a tier."""
        if trie.has_coded:
            return int(self.bytes_of(trie, np.array([row]), tier)[0])
        return int((trie.slots[row, tier.level] != NO_SLOT) @ self.part_bytes(trie, tier))

    def bytes_of_groups(self, trie: Trie, rows: Rows, groups: GroupMask, tier: Tier) -> Int64s:
        """[len(rows)]: bytes of the slots that the KV groups in each mask take in a tier, which has them."""
        return self._slots_bytes(trie, rows, tier, (groups[:, None] & trie.part_mask) != 0)

    def _slots_bytes(self, trie: Trie, rows: Rows, tier: Tier, has: npt.NDArray[np.bool_]) -> Int64s:
        """[len(rows)]: bytes of the slots of parts, [len(rows), parts], in a tier."""
        nbytes: Int64s
        if trie.has_coded and tier is self._tiers.durable:
            nbytes = np.where(has, trie.stored_slots_bytes(rows), 0).sum(axis=1)
        else:
            nbytes = has @ self.part_bytes(trie, tier)
        return nbytes

    def _sizes(self, trie: Trie, tier: Tier) -> _Sizes:
        known = self._slot_bytes.get((trie.ordinal, tier.level))
        # A new pool may have other frames, and a trie can get another geometry.
        if (
            known is None
            or known.part_bytes is not trie.part_bytes
            or (known.tier is not tier and self._tiers.exists(tier))
        ):
            parts = np.array([_slot_bytes(tier, nbytes) for nbytes in trie.part_bytes], np.int64)
            masks = np.arange(trie.all_groups + 1, dtype=np.uint8)
            groups = ((masks[:, None] & trie.part_mask) != 0) @ parts
            known = self._slot_bytes[trie.ordinal, tier.level] = _Sizes(tier, trie.part_bytes, parts, groups)
        return known

    # -- cached bytes ---------------------------------------------------------------------------------------------

    def count_cached(self, trie: Trie, rows: Rows, tier: Tier, slots: Slots, sign: int) -> None:
        """Counts slots, [m, parts], that blocks got (1), or will lose (-1), in a tier."""
        if tier.level >= len(QUOTA_TIERS):
            return
        nbytes = self._slots_bytes(trie, rows, tier, slots != NO_SLOT)
        if len(self.tenants.all) == 1:
            self._cached[0, tier.level] += sign * int(nbytes.sum())
        else:
            self._fit()
            np.add.at(self._cached[:, tier.level], self.owners(trie, rows), sign * nbytes)
        if tier is self._tiers.durable:
            self.stored.count(trie, rows, self.owners(trie, rows), slots != NO_SLOT, sign)

    def _fit(self) -> None:
        if (lacking := len(self.tenants.all) - len(self._cached)) > 0:
            self._cached, self._leaving = (
                np.concatenate([column, np.zeros((lacking, len(QUOTA_TIERS)), np.int64)])
                for column in (self._cached, self._leaving)
            )

    def recount(self, tries: Sequence[Trie]) -> None:
        """Counts the bytes of all tries anew, after blocks were entered without `count_cached`."""
        self._fit()
        self._cached[:] = 0
        self.stored.clear()
        for trie in tries:
            for part in slices(trie.rows):
                rows = np.arange(part.start, part.stop)
                for tier in self._tiers.own:
                    here = rows[(trie.slots[rows, tier.level] != NO_SLOT).any(axis=1)]
                    self.count_cached(trie, here, tier, trie.slots[here, tier.level], 1)

    @contextmanager
    def leaving(self, tier: Tier, victims: Sequence[tuple[Trie, Rows]]) -> Iterator[None]:
        """A context in which blocks' copies leave `tier`: `losses` of other callers do not include them."""
        self._fit()
        nbytes = np.zeros(len(self._leaving), np.int64)
        for trie, rows in victims:
            np.add.at(nbytes, self.owners(trie, rows), self.bytes_of(trie, rows, tier))
        self._leaving[: len(nbytes), tier.level] += nbytes
        try:
            yield
        finally:
            self._leaving[: len(nbytes), tier.level] -= nbytes

    def leaving_bytes(self, tenant: Tenant, tier: Tier) -> int:
        """Bytes of a tenant's blocks that are leaving a tier."""
        return int(self._leaving[tenant.ordinal, tier.level]) if tenant.ordinal < len(self._leaving) else 0

    # -- accounts of slots in flight ------------------------------------------------------------------------------

    def moving(self, tenant: Tenant, tier: Tier) -> Account:
        """The account of a tenant's slots in flight: copies under way, and everything that is granted."""
        return self._moving.setdefault((tenant.ordinal, tier.level), Account())

    def granted(self, tenant: Tenant, tier: Tier) -> Account:
        """The account of slots in flight that a tenant keeps for as long as it likes: reservations, quarantine, frames
        of runs."""
        account = self._granted.get((tenant.ordinal, tier.level))
        if account is None:
            account = self._granted[tenant.ordinal, tier.level] = Account(self.moving(tenant, tier))
        return account

    # -- figures --------------------------------------------------------------------------------------------------

    def cached_bytes(self, tenant: Tenant, tier: Tier) -> int:
        """Bytes of a tenant's blocks in a tier."""
        return int(self._cached[tenant.ordinal, tier.level]) if tenant.ordinal < len(self._cached) else 0

    def cached_by_level(self) -> list[int]:
        """Bytes of all tenants' blocks in each tier that has quotas, by level."""
        nbytes: list[int] = self._cached.sum(axis=0).tolist()
        return nbytes

    def used_bytes(self, tenant: Tenant, tier: Tier) -> int:
        """Bytes that a tenant has of a tier, which `most` limits."""
        return self.cached_bytes(tenant, tier) + self.moving(tenant, tier).nbytes

    def held_bytes(self, tenant: Tenant, tier: Tier) -> int:
        """Bytes that a tenant keeps in a tier for as long as it likes: granted, leased, in its runs, or pinned. Pins
        count in the last tier, where pinned blocks always stay."""
        pinned = self._pinned[tenant.ordinal] if self._tiers.own[-1:] == [tier] else 0
        return self.granted(tenant, tier).nbytes + self.held.nbytes(tenant, tier) + pinned

    def count_pinned(self, tries: Sequence[Trie]) -> Steps[None]:
        """Counts the pinned bytes anew, after a change of pins."""
        pinned: Counter[int] = Counter()
        for trie in list(tries):
            block_bytes = int(self.part_bytes(trie, self._tiers.own[-1]).sum())
            for part in slices(trie.rows):
                owners = self.owners(trie, part.start + np.flatnonzero(trie.pinned[part]))
                for owner, blocks in zip(*np.unique(owners, return_counts=True), strict=True):
                    pinned[int(owner)] += int(blocks) * block_bytes
                yield None
        self._pinned = pinned

    def check_pin(self, trie: Trie, path: Rows) -> None:
        """Raises ExhaustedError if the blocks of a prefix, once pinned, are more than their tenant may hold."""
        tier = self._tiers.own[-1]
        for tenant, fresh in self.by_owner(trie, path[~trie.pinned[path]]):
            room = self.room_to_hold(tenant, tier)
            if room is not None and len(fresh) * int(self.part_bytes(trie, tier).sum()) > room:
                self.refuse_to_hold(tenant, tier, "unpin other prefixes")

    # -- limits of a tenant ---------------------------------------------------------------------------------------

    def room(self, tenant: Tenant, tier: Tier) -> int | None:
        """Bytes that a tenant may still get in a tier; below 0 if its quota was lowered; None: no limit."""
        most = _quota(tenant, tier.level)[1]
        return None if most is None else most - self.used_bytes(tenant, tier)

    def never_fits(self, tenant: Tenant, tier: Tier, nbytes: int) -> bool:
        """Whether `nbytes` exceed a tenant's limit in a tier even if it has no other bytes there."""
        most = _quota(tenant, tier.level)[1]
        return most is not None and most < nbytes

    @staticmethod
    def guaranteed(tenant: Tenant, tier: Tier) -> int:
        """Bytes that a tenant is guaranteed of a tier."""
        return _quota(tenant, tier.level)[0]

    def hold_bounds(self, tier: Tier, capacity_bytes: int | None = None) -> dict[Tenant, int] | None:
        """Bytes that each tenant may hold in a tier, of its size or of `capacity_bytes`, if no other tenant holds any;
        None: there are no quotas."""
        if capacity_bytes is None:
            capacity_bytes = tier.capacity_bytes
        quotas = {tenant: _quota(tenant, tier.level) for tenant in self.tenants.all}
        if all(quota == _UNLIMITED for quota in quotas.values()):
            return None
        common = capacity_bytes - sum(guaranteed for guaranteed, _ in quotas.values())
        return {
            tenant: min(guaranteed + max(common, 0), capacity_bytes if most is None else most)
            for tenant, (guaranteed, most) in quotas.items()
        }

    def room_to_hold(self, tenant: Tenant, tier: Tier) -> int | None:
        """Bytes that a tenant may still hold in a tier, so that the guarantees of others can be met; None: no limit.

        A tenant may hold its own guarantee, and the bytes of the tier that are neither guaranteed to others nor held by
        them beyond their guarantees.
        """
        if (bounds := self.hold_bounds(tier)) is None:
            return None
        others = [
            max(self.guaranteed(other, tier), self.held_bytes(other, tier)) for other in bounds if other is not tenant
        ]
        common = tier.capacity_bytes - sum(others) - self.guaranteed(tenant, tier)
        bound = min(bounds[tenant], self.guaranteed(tenant, tier) + max(common, 0))
        return bound - self.held_bytes(tenant, tier)

    def kept_from(self, tenant: Tenant, tier: Tier) -> int:
        """Bytes of a tier that other tenants have and do not lose to this one: held, pinned, or guaranteed."""
        return sum(
            max(self.held_bytes(other, tier), min(self.cached_bytes(other, tier), self.guaranteed(other, tier)))
            for other in self.tenants
            if other is not tenant
        )

    def refuse_to_hold(self, tenant: Tenant, tier: Tier, remedy: str) -> None:
        """Raises the ExhaustedError for a tenant that may hold no more of a tier."""
        own, most = _quota(tenant, tier.level)
        held, used = self.held_bytes(tenant, tier), self.used_bytes(tenant, tier)
        if most is not None and most - held <= (self.room_to_hold(tenant, tier) or 0):
            raise tenant.refusal(
                f"{tier.name}_most", f"it holds {held} of {most} bytes of the {tier.name} tier", remedy
            )
        raise tenant.refusal(
            f"{tier.name}_guaranteed",
            f"it holds {held} bytes of the {tier.name} tier ({own} guaranteed, {used} used), and the rest of its "
            f"{tier.capacity_bytes} bytes is held by, or guaranteed to, others",
            remedy,
        )

    def refuse_at_most(self, tenant: Tenant, tier: Tier, nbytes: int, remedy: str) -> None:
        """Raises ExhaustedError if `nbytes` more exceed a tenant's limit in a tier."""
        room = self.room(tenant, tier)
        if room is not None and room < nbytes:
            used = self.used_bytes(tenant, tier)
            raise tenant.refusal(
                f"{tier.name}_most",
                f"it has {used} of {used + room} bytes of the {tier.name} tier, {nbytes} more are needed, and none of "
                "its blocks there may be evicted",
                remedy,
            )

    # -- evictions for a tenant -----------------------------------------------------------------------------------

    def losses(
        self, tenant: Tenant | None, tier: Tier, *, own: bool = False, wanted: int | None = None
    ) -> Losses | None:
        """What each tenant may lose when room is made in a tier for `tenant`, or for none in particular; None: all.

        `own`: the tenant is at its limit and only it loses blocks, no more of them than `wanted` bytes take.
        """
        if tier.level >= len(QUOTA_TIERS):
            return None
        if not own and not any(_quota(other, tier.level)[0] for other in self.tenants.all):
            return None
        self._fit()
        left = np.full(len(self._cached) + 1, -1, np.int64)
        if not own:
            for other in self.tenants:
                # Copies under way do not count: they may fail.
                has = self.cached_bytes(other, tier) + self.granted(other, tier).nbytes
                has -= int(self._leaving[other.ordinal, tier.level])
                left[other.ordinal] = max(0, has - _quota(other, tier.level)[0])
        if tenant is not None:
            left[tenant.ordinal] = _NO_LIMIT
        return Losses(self, tier, left, wanted)

    @staticmethod
    def footprint(tier: Tier, sizes: Sequence[int]) -> int:
        """Bytes of the slots that parts of `sizes` bytes take in a tier."""
        return sum(_slot_bytes(tier, nbytes) for nbytes in sizes)

    # -- integrity ------------------------------------------------------------------------------------------------

    def owner_of(self) -> Callable[[npt.NDArray[np.int32]], Rows]:
        """A function from namespaces to their tenants as of now, 0 for unknown ones; a thread may call it."""
        known = self._owner_of.copy() if len(self.tenants.all) > 1 else np.zeros(0, np.int64)

        def owners(namespaces: npt.NDArray[np.int32]) -> Rows:
            there = (namespaces >= 0) & (namespaces < len(known))
            found = np.zeros(len(namespaces), np.int64)
            found[there] = known[namespaces[there]]
            return found

        return owners

    def counted(self, tier: Tier) -> Int64s:
        """[tenants]: the cached bytes counted in a tier."""
        self._fit()
        return self._cached[:, tier.level].copy()


_UNLIMITED = (0, None)


def _quota(tenant: Tenant, level: int) -> tuple[int, int | None]:
    """The bytes of a tier that a tenant is guaranteed, and the most that it may have."""
    if level >= len(QUOTA_TIERS):
        return _UNLIMITED
    quota = tenant.quota.tiers[level]
    return quota.guaranteed_bytes, quota.most_bytes


def _slot_bytes(tier: Tier, nbytes: int) -> int:
    return tier.footprint((nbytes,)) if isinstance(tier, MemoryTier) else round_to_slot(nbytes)
