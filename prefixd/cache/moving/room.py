"""Makes room in a tier, in the same way for every tier.

1. Bytes that only shorter prefixes need are dropped first.
2. Then single blocks leave, or whole pages if blocks of other sizes take the room (`victims`, `page_victims`). A block
   that the next tier down lacks and may take is copied there before: a demotion (paper
   `prefix_cache_long_term_memory`, IV.B).
3. If no block can be demoted, blocks that may vanish are dropped.
4. Last, only in the compute tier: bytes that are not held and that a likely prefix needs are dropped, from blocks that
   are held or kept for a longer prefix.

Room for a tenant is taken from the bytes that tenants have beyond their guarantees (`tenant_use`). If no tenant has
such bytes, it is taken from the tenant's own blocks. So no tenant loses guaranteed bytes to another one. A tenant at
its limit loses only its own blocks, no more than needed.

Several callers may make room in one tier at once. Each holds the blocks that it has chosen, so they are not chosen
twice; write-back does the same. A caller that finds no victim searches again after others have released such blocks. It
waits for that and lends them its urgency. A caller waits only for callers of its own tier, and these wait only for
callers further down, so there is no cycle. Blocks that could not leave at all do not cause another search, so callers
that all find no room do not wake each other for ever.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from prefixd.base.tenancy.tenants import Tenant
from prefixd.cache.disk.copies import DiskCopies
from prefixd.cache.index.trie import Rows, Trie
from prefixd.cache.moving.page_victims import find_page_victims, has_other_sizes
from prefixd.cache.moving.victims import Limits, Search, find_expired, find_victims
from prefixd.cache.placement.movement import Movement
from prefixd.cache.placement.placement import Placement
from prefixd.cache.rules import GroupMask
from prefixd.observability.eviction_journal import Reason, because
from prefixd_swap import EvictionPolicy
from prefixd_swap.tiers import Tier

_OWN_AT_ONCE = 384

Copy = Callable[..., Awaitable[int]]
"""As `Copying.copy`."""


@dataclass(eq=False, slots=True)
class _UnderWay:
    """Blocks of a tier that are held now and may be evicted afterwards.

    Attributes:
        movement: why they are held.
        done: set when they are released.
        in_vain: none of them could leave the tier, for this caller or another one.
    """

    movement: Movement
    done: asyncio.Event = field(default_factory=asyncio.Event)
    in_vain: bool = False


@dataclass(slots=True)
class _RoomRequest:
    """The arguments of `Room.make`, and whose blocks may leave."""

    tier: Tier
    sizes: Sequence[int]
    want: int
    ahead: bool
    own: bool
    mixed: bool
    limits: Sequence[Limits]
    """What tenants may lose, tried in this order until one has a victim."""


class Room:
    """Makes room.

    Args:
        placement: records where blocks are.
        tries: all tries, by ordinal.
        policy: orders the victims.
        disk: removes evicted blocks from the durable tier.
    """

    copy: Copy
    """Copies blocks a tier down; set after construction."""

    def __init__(self, placement: Placement, tries: list[Trie], policy: EvictionPolicy, disk: DiskCopies) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._use = placement.use
        self._tries = tries
        self._policy = policy
        self._disk = disk
        self._making: dict[Tier, set[_UnderWay]] = {}
        self._releases: Counter[Tier] = Counter()  # how often blocks left, or evictable blocks were released

    @property
    def making(self) -> bool:
        """Whether blocks are on their way down to make room."""
        return bool(self._making)

    @contextmanager
    def under_way(self, tier: Tier, movement: Movement) -> Iterator[_UnderWay]:
        """A context that holds evictable blocks of `tier`; callers that find no room wait for its end."""
        work = _UnderWay(movement)
        self._making.setdefault(tier, set()).add(work)
        try:
            yield work
        finally:
            work.done.set()
            self._releases[tier] += not work.in_vain
            self._making[tier].discard(work)
            if not self._making[tier]:
                del self._making[tier]

    async def make(
        self,
        tier: Tier,
        sizes: Sequence[int],
        want: int,
        movement: Movement,
        tenant: Tenant | None = None,
        *,
        ahead: bool = False,
        own: bool = False,
        mixed: bool = False,
    ) -> bool:
        """Makes room in `tier` for up to `want` blocks with parts of `sizes` bytes.

        Args:
            tier: where.
            sizes: bytes of each part.
            want: how many blocks.
            movement: why room is made; demotions are as urgent.
            tenant: the owner of these blocks; None: no tenant in particular.
            ahead: do not evict copies of blocks that are in a tier above as well; see `Claim`.
            own: the tenant is at its limit: only its own blocks leave.
            mixed: the room is in pages with slots of any sizes; `sizes` are what they have on average.

        Returns:
            Whether blocks left, for this caller or another one; False if none may leave.
        """
        with because(Reason.QUOTA if own else Reason.ROOM, "" if tenant is None else tenant.name):
            return await self._make(tier, sizes, want, movement, tenant, ahead=ahead, own=own, mixed=mixed)

    async def _make(
        self,
        tier: Tier,
        sizes: Sequence[int],
        want: int,
        movement: Movement,
        tenant: Tenant | None,
        *,
        ahead: bool,
        own: bool,
        mixed: bool,
    ) -> bool:
        needed: Callable[[], int] | None = None
        if own and tenant is not None:
            needed = partial(self._needed, tenant, tier, want * self._use.footprint(tier, sizes))
            while needed() <= 0 < needed() + self._use.leaving_bytes(tenant, tier):
                # Other callers have chosen enough of the tenant's blocks already. If these stay, choose below.
                if await self._wait_for_releases(tier, self._releases[tier], movement):
                    return True
            if needed() <= 0:
                return True
            want = _OWN_AT_ONCE  # the victims may be smaller: their bytes decide how many leave
        limits = [lambda: self._use.losses(tenant, tier, own=own, wanted=None if needed is None else needed())]
        if not own and tenant is not None and self._use.guaranteed(tenant, tier):
            spare = self._use.losses(None, tier)
            if spare is not None and (spare.left > 0).any():
                limits.insert(0, lambda: self._use.losses(None, tier))
        request = _RoomRequest(tier, sizes, want, ahead, own, mixed, limits)
        releases = self._releases[tier]
        freed: int | None = await self._expire(request, movement, likely=False)
        if not freed and (below := self._tiers.below(tier)) is not None:
            freed = await self._demote(request, below, movement)
        if movement.dropped:  # blocks that were not copied down stay
            return False
        if freed == 0:  # no block can be demoted: drop blocks that may vanish
            victims, with_page = await self._choose(request, demotable=False)
            freed = await self._drop(tier, victims, with_page, movement)
        if not freed and tier.relent():
            return True
        if not freed and not self._making.get(tier):  # else others may release blocks that can be demoted
            freed = await self._expire_likely(request, movement)
        if freed:
            self._releases[tier] += 1
            self._placement.changed.set()
            return True
        if needed is not None and needed() <= 0:  # other blocks of the tenant left during the search
            return True
        if await self._wait_for_releases(tier, releases, movement):
            return True
        return await self._expire_likely(request, movement) > 0

    def _needed(self, tenant: Tenant, tier: Tier, nbytes: int) -> int:
        """Bytes that must leave before a tenant at its limit may have `nbytes` more, without those leaving already."""
        return nbytes - (self._use.room(tenant, tier) or 0) - self._use.leaving_bytes(tenant, tier)

    async def _expire_likely(self, request: _RoomRequest, movement: Movement) -> int:
        return await self._expire(request, movement, likely=True) if request.tier is self._tiers.compute else 0

    async def _expire(self, request: _RoomRequest, movement: Movement, *, likely: bool) -> int:
        tier, expired = request.tier, list[tuple[Trie, Rows, GroupMask]]()
        for limits in request.limits:
            if not expired:
                expired = await find_expired(self._tries, tier.level, request.want, likely=likely, limits=limits)
        if tier is self._tiers.durable:
            return await self._disk.removals.drop_groups(expired, movement)
        return sum(self._placement.drop(trie, rows, tier, groups) for trie, rows, groups in expired)

    async def _demote(self, request: _RoomRequest, below: Tier, movement: Movement) -> int | None:
        """Copies the next victims down if the tier below lacks them, and drops them; returns how many left.

        None if no block may leave now. The caller then drops nothing else: a block that is held for a moment may be
        demoted later and must not vanish instead.
        """
        tier = request.tier
        victims, with_page = await self._choose(request, demotable=True)
        if not victims:
            return None
        with self._use.leaving(tier, victims), self.under_way(tier, movement) as work:
            await self._copy_down("eviction", tier, below, victims, movement, request.ahead)
            if movement.dropped:
                return 0
            dropped = await self._drop(tier, victims, with_page, movement)
            work.in_vain = not dropped
            return dropped

    async def send_down(self, owner: str, tier: Tier, trie: Trie, rows: Rows, movement: Movement) -> int:
        """Evicts blocks that the caller has chosen from `tier`, as `make` does with the victims that it chooses.

        Args:
            owner: name of the hold on them meanwhile.
            tier: where they are.
            trie: the blocks' trie.
            rows: [m] different blocks, children before parents. Blocks with another hold stay.
            movement: why they are evicted.

        Returns:
            The number of blocks that were copied to the next tier down. The others had a copy there or found no room;
            such a block vanishes if nothing keeps it.
        """
        copied = 0
        with self._use.leaving(tier, [(trie, rows)]), self.under_way(tier, movement) as work:
            if (below := self._tiers.below(tier)) is not None:
                chosen = [(trie, rows)]
                copied = await self._copy_down(owner, tier, below, chosen, movement, ahead=False, all_admitted=True)
            dropped = await self._drop(tier, [(trie, rows)], False, movement)
            work.in_vain = not dropped
        if dropped:
            self._releases[tier] += 1
            self._placement.changed.set()
        return copied

    async def _copy_down(
        self,
        owner: str,
        tier: Tier,
        below: Tier,
        victims: Sequence[tuple[Trie, Rows]],
        movement: Movement,
        ahead: bool,
        *,
        all_admitted: bool = False,
    ) -> int:
        """Copies blocks that the next tier down lacks to it, and holds them meanwhile; returns how many were copied.

        Only blocks that were used often enough are copied to disk, unless `all_admitted`.
        """
        copied = 0
        with ExitStack() as held:
            for trie, rows in victims:  # hold all before the first copy: rows may be reused meanwhile
                held.enter_context(self._placement.holds.hold(owner, trie, rows, tier))
            for trie, rows in victims:
                # Copy to the next tier even if there is a copy further down: the block was used recently.
                sinks = (trie.wanted(rows, tier.level) & ~trie.there[rows, below.level]) != 0
                if below is self._tiers.durable and not all_admitted:
                    sinks &= self._placement.admits(trie, rows)
                if sinks.any():
                    copied += await self.copy(trie, rows[sinks], tier, below, movement, ahead=ahead)
        self._tiers.counters[tier.level].demoted += copied
        return copied

    async def _choose(self, request: _RoomRequest, *, demotable: bool) -> tuple[list[tuple[Trie, Rows]], bool]:
        """The next victims, and whether whole pages leave."""
        victims: tuple[list[tuple[Trie, Rows]], bool] = [], False
        for limits in request.limits:
            if not victims[0]:
                victims = await self._choose_within(limits, request, demotable=demotable)
        return victims

    async def _choose_within(
        self, limits: Limits, request: _RoomRequest, *, demotable: bool
    ) -> tuple[list[tuple[Trie, Rows]], bool]:
        tier, want = request.tier, request.want
        choose, level = tier.choose_mixed if request.mixed else tier.choose_victims, tier.level
        search = Search(level, self._policy, demotable, request.ahead, self._placement.clock())
        singly = not (tier.evicts_pages_alone or request.mixed)
        by_pages = not singly or has_other_sizes(self._tries, level, request.sizes)
        if choose is None or request.own or not by_pages:
            if choose is None and not request.own:
                want = _blocks_with_as_many_slots(self._tries, level, want * len(request.sizes))
            return await find_victims(self._tries, search, want, limits=limits), False
        later = None if request.mixed else tier.choose_victims_later
        found = await find_page_victims(
            self._tries, search, request.sizes, want, choose, for_thread=later, limits=limits, singly=singly
        )
        return found, True

    async def _drop(self, tier: Tier, victims: Sequence[tuple[Trie, Rows]], with_page: bool, movement: Movement) -> int:
        if tier is self._tiers.durable:
            return await self._disk.removals.evict(victims, with_page, movement)
        return sum(self._placement.drop(trie, rows, tier, with_page=with_page) for trie, rows in victims)

    async def _wait_for_releases(self, tier: Tier, before: int, movement: Movement) -> bool:
        """Waits while others hold evictable blocks; returns whether the tier's releases have changed from `before`."""
        urgency = movement.urgency
        while self._releases[tier] == before and (others := list(self._making.get(tier, ()))):
            waits = [asyncio.ensure_future(other.done.wait()) for other in others]
            for other in others:
                other.movement.lend(urgency)
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for other in others:
                    other.movement.take_back(urgency)
                for wait in waits:
                    wait.cancel()
        return self._releases[tier] != before


def _blocks_with_as_many_slots(tries: Sequence[Trie], tier: int, slots: int) -> int:
    """The least number of blocks of `tier` that have `slots` slots: more can be chosen later, but none brought back."""
    bit = np.uint8(1 << tier)
    parts = [len(trie.part_bytes) for trie in tries if (trie.any_part[: trie.rows] & bit).any()]
    return -(-slots // max(parts, default=1))
