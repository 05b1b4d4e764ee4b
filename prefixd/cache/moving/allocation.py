"""Allocates slots in a memory tier, and evicts blocks if no slot is free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

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
    """

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
                    elif not await self._make_room(tier, sizes, allowed, lacking, claim):
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
        limits = [(wanted + tier.used_bytes - tier.capacity_bytes, False)]
        if (room := self._use.room(tenant, tier)) is not None:
            limits.append((wanted - room, True))
        for lacking, own in limits:
            if lacking > 0:
                losses = self._use.losses(tenant, tier, own=own)
                may_sink = self._tiers.below(tier) is not None
                if not await can_free(
                    *(self._tries, tier.level, lacking),
                    demotable=may_sink,
                    weigh=lambda nbytes: tier.footprint((nbytes,)),
                    losses=losses,
                ):
                    return None
        claim = Claim(tenant=tenant, account=self._use.granted(tenant, tier))
        slots = await self.allocate(tier, sizes, count, claim, near)
        if len(slots) < count:
            tier.free(slots)
            return None
        frames: list[int] = slots.ravel().tolist()
        return frames
