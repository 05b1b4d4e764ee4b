"""Slots in a memory tier: free ones, or those of blocks that leave for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

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


def _demand() -> Movement:
    return Movement(Urgency.DEMAND)


@dataclass(frozen=True, slots=True)
class Claim:
    """For what slots are allocated.

    Attributes:
        movement: what they are for; by default somebody waits for them.
        tenant: whom they are for; None: nobody in particular. A tenant never gets above its most; before that its own
            blocks go.
        account: has their bytes; `TenantUse.moving` by default.
        limit: bytes that may be allocated beside what is; asked whenever something is about to be; None: any.
        ahead: spare copies of blocks that are in a tier above as well: they were made ahead of need, too, and one such
            copy must not cost another.
    """

    movement: Movement = field(default_factory=_demand)
    tenant: Tenant | None = None
    account: Account | None = None
    limit: Callable[[], int | None] | None = None
    ahead: bool = False


class Allocation:
    """Allocates slots.

    Args:
        placement: what is where.
        tries: all tries, by ordinal.
        room: makes room.
        checksums: their blocks are held, and may go afterwards.
        working: around what has slots in hand that nothing else accounts for.
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
        """Slots in flight for up to `blocks` blocks in a memory tier, evicting what may go; fewer if need be.

        Args:
            tier: where.
            sizes: bytes of each of the p parts of a block.
            blocks: how many.
            claim: what they are for.
            near: slots [p] of a block of the same prefix, close to which the new ones should lie; NO_SLOT for none.

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
        with self._working():  # these slots are in nobody's book until this returns
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
        """Makes room for some of the `lacking` blocks; whether there may be room now. `allowed`: of these, as many as
        the tenant may still have."""
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
        """Frames of the compute tier in flight, `count` times one or more for each of `widths`; all or none.

        Args:
            count: how often.
            widths: frames side by side of each slot, as a block's parts take them (`KvShape.block_widths`).
            tenant: whom they are for, to keep as long as it likes; the default one by default.
            near: slots [widths] of the same prefix, see `allocate`.
            beside: frames that are taken next. Nothing is evicted when not all, these included, can be had; where parts
                of several sizes share large pages that is an estimate.

        Returns:
            Of each slot the first frame.
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
                losses, weigh = self._use.losses(tenant, tier, own=own), partial(_bytes_of_part, tier)
                may_sink = self._tiers.below(tier) is not None
                if not await can_free(self._tries, tier.level, lacking, demotable=may_sink, weigh=weigh, losses=losses):
                    return None
        claim = Claim(tenant=tenant, account=self._use.granted(tenant, tier))
        slots = await self.allocate(tier, sizes, count, claim, near)
        if len(slots) < count:
            tier.free(slots)
            return None
        frames: list[int] = slots.ravel().tolist()
        return frames


def _bytes_of_part(tier: MemoryTier, nbytes: int) -> int:
    return tier.footprint((nbytes,))
