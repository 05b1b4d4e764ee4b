"""Room in a tier: one way to make it, whatever the tier is.

1. Bytes that only shorter prefixes need go before anything else.
2. Then single blocks go, or whole pages where blocks of other sizes have the room (see `victims`, `page_victims`). What
   has no copy in the next tier down, and may go there, is copied there before: a demotion (paper
   `prefix_cache_long_term_memory`, IV.B).
3. Where nothing can go down, what may vanish does.
4. Last, where requests run, bytes go that a prefix needs which is likely to be asked for, but that nobody holds: of
   blocks which somebody holds, or keeps, for a longer prefix.

Room is made for a tenant, at the cost of what all have beyond what they are guaranteed (`tenant_use`), and only where
nobody has anything beyond that, of its own blocks: nobody loses what is guaranteed to him, and a tenant with so much
less than that does not make room for itself. Where the tenant is at its most, only its own blocks go, as many as it
takes.

Several may make room in one tier at once: each holds the blocks that it has chosen, so nobody chooses them again; so
does write-back. Who finds nothing to choose looks again when others have let go of what they held so, and waits for it
if need be, and lends them his urgency. He waits in his own tier for somebody who waits, if at all, further down; so
nobody waits in a circle. Blocks that could go nowhere are no reason to look again; so callers who all find no room do
not send each other round for ever.
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
from prefixd_swap import EvictionPolicy
from prefixd_swap.tiers import Tier

_OWN_AT_ONCE = 384

Copy = Callable[..., Awaitable[int]]
"""As `Copying.copy`."""


@dataclass(eq=False, slots=True)
class _UnderWay:
    """Blocks of a tier are held that may go afterwards.

    Attributes:
        movement: what they are held for.
        done: set when they are let go.
        in_vain: they could go nowhere, and cannot for anybody else.
    """

    movement: Movement
    done: asyncio.Event = field(default_factory=asyncio.Event)
    in_vain: bool = False


@dataclass(slots=True)
class _Wish:
    """The room that is wanted: for `want` blocks with parts of `sizes` bytes; see `Room.make`."""

    tier: Tier
    sizes: Sequence[int]
    want: int
    ahead: bool
    own: bool
    limits: Sequence[Limits]
    """What tenants may lose for it: each where there is nothing within those before it."""


class Room:
    """Makes room.

    Args:
        placement: what is where.
        tries: all tries, by ordinal.
        policy: who goes first.
        disk: tells the durable tier what has left it.
    """

    copy: Copy
    """Copies blocks a tier down; set once there is something that does."""

    def __init__(self, placement: Placement, tries: list[Trie], policy: EvictionPolicy, disk: DiskCopies) -> None:
        self._placement = placement
        self._tiers = placement.tiers
        self._use = placement.use
        self._tries = tries
        self._policy = policy
        self._disk = disk
        self._making: dict[Tier, set[_UnderWay]] = {}
        self._chances: Counter[Tier] = Counter()  # how often something went, or blocks that may go were let go

    @property
    def making(self) -> bool:
        """Whether blocks are on their way down to make room."""
        return bool(self._making)

    @contextmanager
    def under_way(self, tier: Tier, movement: Movement) -> Iterator[_UnderWay]:
        """Blocks of `tier` are held within it that may go afterwards: who finds no room waits for its end."""
        work = _UnderWay(movement)
        self._making.setdefault(tier, set()).add(work)
        try:
            yield work
        finally:
            work.done.set()
            self._chances[tier] += not work.in_vain
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
    ) -> bool:
        """Makes room in `tier` for up to `want` blocks with parts of `sizes` bytes.

        Args:
            tier: where.
            sizes: bytes of each part.
            want: how many blocks.
            movement: what the room is for: what leaves for it is as urgent.
            tenant: whom the blocks belong to; None: nobody in particular.
            ahead: spare copies of blocks that are in a tier above as well; see `Mover.allocate`.
            own: the tenant is at its most: only its own blocks go.

        Returns:
            Whether something went, here or elsewhere; False when nothing may go.
        """
        needed: Callable[[], int] | None = None
        if own and tenant is not None:
            needed = partial(self._needed, tenant, tier, want * self._use.footprint(tier, sizes))
            while needed() <= 0 < needed() + self._use.leaving_bytes(tenant, tier):
                # Others have chosen enough of the tenant's blocks already. If those stay, own ones are chosen below.
                if await self._others_give_a_chance(tier, self._chances[tier], movement):
                    return True
            if needed() <= 0:
                return True
            want = _OWN_AT_ONCE  # the blocks may be smaller: how many go is decided by their bytes
        limits = [lambda: self._use.losses(tenant, tier, own=own, wanted=None if needed is None else needed())]
        if not own and tenant is not None and self._use.guaranteed(tenant, tier):
            spare = self._use.losses(None, tier)
            if spare is not None and (spare.left > 0).any():
                limits.insert(0, lambda: self._use.losses(None, tier))
        wish = _Wish(tier, sizes, want, ahead, own, limits)
        chances = self._chances[tier]
        freed: int | None = await self._expire(wish, movement, likely=False)
        if not freed and (below := self._tiers.below(tier)) is not None:
            freed = await self._demote(wish, below, movement)
        if movement.dropped:  # what was not copied down for it stays where it is
            return False
        if freed == 0:  # nothing can go down: drop what may vanish
            victims, with_page = await self._choose(wish, demotable=False)
            freed = await self._drop(tier, victims, with_page, movement)
        if not freed and not self._making.get(tier):  # else others may let go of what can go down
            freed = await self._expire_likely(wish, movement)
        if freed:
            self._chances[tier] += 1
            self._placement.changed.set()
            return True
        if needed is not None and needed() <= 0:  # while blocks were looked for, others of the tenant's went
            return True
        if await self._others_give_a_chance(tier, chances, movement):
            return True
        return await self._expire_likely(wish, movement) > 0

    def _needed(self, tenant: Tenant, tier: Tier, nbytes: int) -> int:
        """Bytes that have to go before a tenant at its most may have `nbytes` more, beside those on their way out."""
        return nbytes - (self._use.room(tenant, tier) or 0) - self._use.leaving_bytes(tenant, tier)

    async def _expire_likely(self, wish: _Wish, movement: Movement) -> int:
        return await self._expire(wish, movement, likely=True) if wish.tier is self._tiers.compute else 0

    async def _expire(self, wish: _Wish, movement: Movement, *, likely: bool) -> int:
        tier, expired = wish.tier, list[tuple[Trie, Rows, GroupMask]]()
        for limits in wish.limits:
            if not expired:
                expired = await find_expired(self._tries, tier.level, wish.want, likely=likely, limits=limits)
        if tier is self._tiers.durable:
            return await self._disk.removals.drop_groups(expired, movement)
        return sum(self._placement.drop(trie, rows, tier, groups) for trie, rows, groups in expired)

    async def _demote(self, wish: _Wish, below: Tier, movement: Movement) -> int | None:
        """Copies the next victims down where they have no copy, and drops them; returns how many went.

        None when no block may leave the tier now: what is held for a moment must not vanish because it is let go before
        somebody looks again.
        """
        tier = wish.tier
        victims, with_page = await self._choose(wish, demotable=True)
        if not victims:
            return None
        with self._use.leaving(tier, victims), self.under_way(tier, movement) as work:
            await self._copy_down("eviction", tier, below, victims, movement, wish.ahead)
            if movement.dropped:
                return 0
            dropped = await self._drop(tier, victims, with_page, movement)
            work.in_vain = not dropped
            return dropped

    async def send_down(self, owner: str, tier: Tier, trie: Trie, rows: Rows, movement: Movement) -> int:
        """Sends blocks that the caller has chosen out of `tier`, as `make` does with those that it chooses.

        Args:
            owner: who holds them meanwhile, for people.
            tier: where they are.
            trie: the blocks' trie.
            rows: [m] different blocks, children before parents. Those that somebody else holds stay.
            movement: what it is done for.

        Returns:
            How many of them were copied to the next tier down; the others had a copy there, or found no room. Of these
            the last copy goes too where the block may vanish.
        """
        copied = 0
        with self._use.leaving(tier, [(trie, rows)]), self.under_way(tier, movement) as work:
            if (below := self._tiers.below(tier)) is not None:
                chosen = [(trie, rows)]
                copied = await self._copy_down(owner, tier, below, chosen, movement, ahead=False, all_admitted=True)
            dropped = await self._drop(tier, [(trie, rows)], False, movement)
            work.in_vain = not dropped
        if dropped:
            self._chances[tier] += 1
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
        """Copies what has no copy in the next tier down to it; how many blocks. They are held meanwhile. To disk goes
        what was asked for often enough, or with `all_admitted` everything."""
        copied = 0
        with ExitStack() as held:
            for trie, rows in victims:  # all of them before the first copy: rows may be recycled meanwhile
                held.enter_context(self._placement.holds.hold(owner, trie, rows, tier))
            for trie, rows in victims:
                # A tier at a time, though there may be a copy further down: what was up here is wanted near.
                sinks = (trie.wanted(rows, tier.level) & ~trie.there[rows, below.level]) != 0
                if below is self._tiers.durable and not all_admitted:
                    sinks &= self._placement.admits(trie, rows)
                if sinks.any():
                    copied += await self.copy(trie, rows[sinks], tier, below, movement, ahead=ahead)
        self._tiers.counters[tier.level].demoted += copied
        return copied

    async def _choose(self, wish: _Wish, *, demotable: bool) -> tuple[list[tuple[Trie, Rows]], bool]:
        """The next victims, and whether they leave with their pages."""
        victims: tuple[list[tuple[Trie, Rows]], bool] = [], False
        for limits in wish.limits:
            if not victims[0]:
                victims = await self._choose_within(limits, wish, demotable=demotable)
        return victims

    async def _choose_within(
        self, limits: Limits, wish: _Wish, *, demotable: bool
    ) -> tuple[list[tuple[Trie, Rows]], bool]:
        tier, want = wish.tier, wish.want
        choose, level = tier.choose_victims, tier.level
        search = Search(level, self._policy, demotable, wish.ahead, self._placement.clock())
        if choose is None or wish.own or not has_other_sizes(self._tries, level, wish.sizes):
            if choose is None and not wish.own:
                want = _blocks_with_as_many_slots(self._tries, level, want * len(wish.sizes))
            return await find_victims(self._tries, search, want, limits=limits), False
        found = await find_page_victims(
            self._tries, search, wish.sizes, want, choose, for_thread=tier.choose_victims_later, limits=limits
        )
        return found, True

    async def _drop(self, tier: Tier, victims: Sequence[tuple[Trie, Rows]], with_page: bool, movement: Movement) -> int:
        if tier is self._tiers.durable:
            return await self._disk.removals.evict(victims, with_page, movement)
        return sum(self._placement.drop(trie, rows, tier, with_page=with_page) for trie, rows in victims)

    async def _others_give_a_chance(self, tier: Tier, before: int, movement: Movement) -> bool:
        """Whether others have made room or let go of blocks that may go, or do so soon, more often than `before`."""
        urgency = movement.urgency
        while self._chances[tier] == before and (others := list(self._making.get(tier, ()))):
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
        return self._chances[tier] != before


def _blocks_with_as_many_slots(tries: Sequence[Trie], tier: int, slots: int) -> int:
    """How many blocks of `tier`, at least, have so many slots: more can be chosen afterwards, but none brought back."""
    bit = np.uint8(1 << tier)
    parts = [len(trie.part_bytes) for trie in tries if (trie.any_part[: trie.rows] & bit).any()]
    return -(-slots // max(parts, default=1))
