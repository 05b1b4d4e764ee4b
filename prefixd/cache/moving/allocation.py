"""Allocates slots in a memory tier, and evicts blocks if no slot is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from prefixd.base.long_work.pacer import give_way
from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.disk.checksums import Checksums
from prefixd.cache.index.trie import Trie
from prefixd.cache.moving.room import Room
from prefixd.cache.moving.victims import can_free
from prefixd.cache.placement.movement import Movement
from prefixd.cache.placement.placement import Placement
from prefixd.cache.tiers import Slots
from prefixd_swap.tiers import Account, MemoryTier
from prefixd_swap.transfers import Urgency

_ALLOCATED_AT_ONCE = 2048  # slots: a millisecond or two on the event loop
_EVICTED_AT_ONCE = 384


class Grow(Protocol):
    """Makes the compute tier larger for a request that waits."""

    async def __call__(self, frames: int, *, needed: bool) -> bool:
        """Adds up to `frames` frames; returns whether some came.

        needed: no block can be evicted instead.
        """


@dataclass(frozen=True, slots=True)
class Claim:
    """The purpose of an allocation, and its limits.

    Attributes:
        movement: the movement that needs the slots; by default one that a caller waits for.
        tenant: the owner; None: no tenant in particular. At its limit a tenant loses its own blocks.
        account: counts their bytes; `TenantUse.moving` by default.
        limit: returns how many more bytes may be allocated, called before each allocation; None: no limit.
        ahead: do not evict copies of blocks that are in a tier above as well: they were made ahead of need, and one
            copy ahead of need must not cost another.
    """

    movement: Movement = field(default_factory=lambda: Movement(Urgency.DEMAND))
    tenant: Tenant | None = None
    account: Account | None = None
    limit: Callable[[], int | None] | None = None
    ahead: bool = False


class Allocation:
    """Allocates slots.

    Args:
        placement: records where blocks are.
        tries: all tries, by ordinal.
        room: makes room.
        checksums: its tasks hold blocks that may be evicted afterwards.
        working: a context for work with slots that are recorded nowhere else.

    Attributes:
        grow: makes the compute tier larger; None: its size is fixed.
    """

    grow: Grow | None = None

    def __init__(
        self,
        placement: Placement,
        tries: list[Trie],
        room: Room,
        checksums: Checksums,
        working: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._tiers = placement.tiers
        self._use = placement.use
        self._tries = tries
        self._room = room
        self._checksums = checksums
        self._working = working

    async def allocate(
        self, tier: MemoryTier, sizes: Sequence[int], blocks: int, claim: Claim | None = None, near: Sequence[int] = ()
    ) -> Slots:
        """Allocates slots for up to `blocks` blocks in a memory tier, evicting blocks; fewer if room is short.

        A compute tier that may grow grows before blocks are evicted, unless the slots are for a prefetch.

        Args:
            tier: where.
            sizes: bytes of each of the p parts of a block.
            blocks: how many.
            claim: their purpose and limits.
            near: slots [p] of a block of the same prefix, to allocate close to; NO_SLOT for none.

        Returns:
            [m, p], m <= blocks.
        """
        claim = claim or Claim()
        allocated: list[Slots] = [np.empty((0, len(sizes)), np.int64)]
        count, footprint = 0, tier.footprint(sizes)
        tenant, account = claim.tenant, claim.account
        if not tier.ever_fits(sizes) or (tenant is not None and self._use.never_fits(tenant, tier, footprint)):
            return allocated[0]
        if tenant is not None and account is None:
            account = self._use.moving(tenant, tier)
        hint = np.array(near, np.int64) if len(near) else None
        at_once = max(1, _ALLOCATED_AT_ONCE // len(sizes))
        with self._working():  # no other structure has these slots until this returns
            try:
                while count < blocks and not claim.movement.dropped:
                    lacking = blocks - count
                    if claim.limit is not None and (most := claim.limit()) is not None:
                        lacking = min(lacking, most // footprint)
                    if lacking <= 0:
                        break
                    room = None if tenant is None else self._use.room(tenant, tier)
                    allowed = lacking if room is None else min(lacking, max(room, 0) // footprint)
                    if allowed and len(some := tier.allocate(sizes, min(allowed, at_once), hint, account)):
                        allocated.append(some)
                        count += len(some)
                        hint = some[-1]
                    elif not (
                        (allowed and await self._grow(tier, lacking * footprint, claim))
                        or await self._make_room(tier, sizes, allowed, lacking, claim)
                        or (allowed and await self._grow(tier, lacking * footprint, claim, needed=True))
                    ):
                        break
                    await give_way()
            except BaseException:
                tier.free(np.concatenate(allocated))
                raise
        return np.concatenate(allocated)

    async def _make_room(
        self, tier: MemoryTier, sizes: Sequence[int], allowed: int, lacking: int, claim: Claim
    ) -> bool:
        """Makes room for some of the `lacking` blocks; returns whether there may be room now.

        `allowed`: how many of them the tenant may still have.
        """
        hashing = set(self._checksums.tasks)  # their blocks are held
        want = min(allowed or lacking, _EVICTED_AT_ONCE)
        if await self._room.make(tier, sizes, want, claim.movement, claim.tenant, ahead=claim.ahead, own=not allowed):
            return True
        hashing |= self._checksums.tasks
        if tier is not self._tiers.shared or not hashing:
            return False
        await asyncio.wait(hashing, return_when=asyncio.FIRST_COMPLETED)  # some of them may go now
        return True

    async def _grow(self, tier: MemoryTier, nbytes: int, claim: Claim, *, needed: bool = False) -> bool:
        """Makes the compute tier larger, so that `nbytes` are free; returns whether it is larger now."""
        if self.grow is None or tier is not self._tiers.compute or claim.movement.urgency is not Urgency.DEMAND:
            return False
        lacking = max(1, nbytes - (tier.capacity_bytes - tier.used_bytes))
        return await self.grow(-(-lacking // self._tiers.frames.frame_bytes), needed=needed)

    async def has_frames(self, count: int) -> bool:
        """Whether the compute tier has `count` frames in all, or has grown to as many."""
        pool = self._tiers.frames
        if pool.lasting < count and self.grow is not None:
            await self.grow(count - pool.lasting, needed=False)
        return pool.lasting >= count

    async def take_frames(
        self,
        count: int,
        widths: Sequence[int] = (1,),
        *,
        tenant: Tenant | None = None,
        near: Sequence[int] = (),
        beside: int = 0,
    ) -> list[int] | None:
        """Allocates slots of `widths` frames each, `count` times, in the compute tier; all, or None.

        Args:
            count: how many of each width.
            widths: adjacent frames of each slot, one for each part of a block (`KvShape.block_widths`).
            tenant: the owner, which may keep them as long as it likes; the default tenant by default.
            near: slots [widths] of the same prefix, see `allocate`.
            beside: frames that the caller needs next. Blocks are evicted only if all frames, including these, can be
                freed; an estimate if parts of several sizes share large pages.

        Returns:
            The first frame of each slot.
        """
        if not count or not widths:
            return []
        tier, frame = self._tiers.compute, self._tiers.frames.frame_bytes
        tenant = tenant or self._use.tenants.default
        sizes = [width * frame for width in widths]
        wanted = count * tier.footprint(sizes) + beside * frame
        claim = Claim(tenant=tenant, account=self._use.granted(tenant, tier))
        room = self._use.room(tenant, tier)
        if room is not None and room < wanted and not await self._can_free(tenant, wanted - room, own=True):
            return None
        if not await self._has_room(wanted, wanted if room is None else min(wanted, room), claim):
            return None
        slots = await self.allocate(tier, sizes, count, claim, near)
        if len(slots) < count:
            tier.free(slots)
            return None
        frames: list[int] = slots.ravel().tolist()
        return frames

    async def _has_room(self, nbytes: int, more: int, claim: Claim) -> bool:
        """Whether `nbytes` of the compute tier are free, or can be freed; makes the tier larger where it may.

        more: bytes that its tenant has more than now after that; it loses others of its own. The tier grows for these.
        """
        tier = self._tiers.compute

        def lacking(nbytes: int) -> int:
            return nbytes + tier.used_bytes - tier.capacity_bytes

        while more > 0 and lacking(more) > 0 and await self._grow(tier, more, claim):
            pass
        while lacking(nbytes) > 0 and not await self._can_free(claim.tenant, lacking(nbytes), own=False):
            if not (more > 0 and lacking(more) > 0 and await self._grow(tier, more, claim, needed=True)):
                return False
        return True

    async def _can_free(self, tenant: Tenant | None, nbytes: int, *, own: bool) -> bool:
        """Whether evictions can free `nbytes` of the compute tier for a tenant; `own`: of its own blocks."""
        tier = self._tiers.compute
        return await can_free(
            *(self._tries, tier.level, nbytes),
            demotable=self._tiers.below(tier) is not None,
            weigh=lambda size: tier.footprint((size,)),
            losses=self._use.losses(tenant, tier, own=own),
        )
