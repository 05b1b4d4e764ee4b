"""Audits slots and holds: compares the tiers' memory and the tries' counters with leases and requests."""

from __future__ import annotations

from itertools import chain
from typing import Protocol

import numpy as np

from prefixd.base.long_work.steps import Steps
from prefixd.cache.audit.findings import Findings
from prefixd.cache.cache import TieredCache
from prefixd.cache.index.scan import memory_for_copies
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.rules import GroupMask
from prefixd.cache.sessions.sessions import Lease, Reservation
from prefixd_swap import IntegrityError
from prefixd_swap.tiers import Int64s, MemoryTier, PagedTier, Tier

_GRANTS = 256  # checked between two pauses

_Held = tuple[Trie, Rows, Tier | None, GroupMask | None]
"""Held blocks, the tier in which their bytes are held, and the KV groups; None as in `Hold`."""


def audit_grants(found: Findings, cache: TieredCache) -> Steps[None]:
    """Checks sessions, leases and reservations."""
    looked_at = 0
    for key, session in list(cache.leases.sessions.items()):
        if cache.leases.sessions.get(key) is not session:
            continue  # it ended meanwhile
        found.sessions += 1
        found.demand(key == session.id, f"session {session.id[:8]} is filed under another id")
        for grant_id, grant in list(session.grants.items()):
            looked_at += 1
            if looked_at % _GRANTS == 0 or isinstance(grant, Lease):
                yield None
            if session.grants.get(grant_id) is not grant:
                continue
            found.demand(
                grant.id == grant_id and grant.session is session,
                f"lease {grant.id} is filed with a session that is not its own",
            )
            if isinstance(grant, Lease):
                found.leases += 1
                lacking = grant.trie.lacking(grant.rows, cache.tiers.shared.level, grant.hold.wanted)
                found.demand(
                    not lacking.any(), f"lease {grant.id} covers blocks that left the {cache.tiers.shared.name} tier"
                )
            elif isinstance(grant, Reservation):
                found.reservations += 1
    for wrong in cache.computing.check_integrity():
        found.demand(False, wrong)


def audit_slots(found: Findings, cache: TieredCache) -> Steps[None]:
    """Checks that every slot in the memory tiers belongs to one block, or is in flight, or is free."""
    for tier in cache.tiers.memories:
        if cache.tiers.exists(tier):
            yield from _audit_owners(found, cache, tier)


def audit_holds(found: Findings, cache: TieredCache) -> Steps[None]:
    """Checks that the tries' counters are the sums of the holds on their blocks."""
    for trie in list(cache.tries):
        for tier in cache.tiers:
            yield from _audit_holds(found, cache, trie, tier)
        yield from _audit_keepers(found, cache, trie)


class _Memory(Protocol):
    def check_integrity(self) -> None:
        """Raises IntegrityError."""

    def allocated(self) -> Int64s:
        """Slots that are taken, ascending."""


class _AsOfNow:
    """A snapshot of a tier that only the event loop may read."""

    def __init__(self, tier: MemoryTier) -> None:
        self._taken, self._wrong = tier.allocated(), ""
        try:
            tier.check_integrity()
        except IntegrityError as error:
            self._wrong = str(error)

    def check_integrity(self) -> None:
        """Raises IntegrityError."""
        if self._wrong:
            raise IntegrityError(self._wrong)

    def allocated(self) -> Int64s:
        """Slots that are taken, ascending."""
        return self._taken


def _audit_owners(found: Findings, cache: TieredCache, tier: MemoryTier) -> Steps[None]:
    level = tier.level
    copies = yield from memory_for_copies(*(trie.slots[: trie.rows, level] for trie in cache.tries))
    name, quiet = tier.name, cache.mover.quiet
    resident = [copies.copy(trie.slots[: trie.rows, level]) for trie in cache.tries]  # rows without a block have none
    flying, claims = tier.in_flight.copy(), _claimed_slots(cache, tier)
    # Millions of slots are compared in a thread, on a copy.
    book: _Memory = tier.pages.copy() if isinstance(tier, PagedTier) else _AsOfNow(tier)

    def compare() -> None:
        try:
            book.check_integrity()
        except IntegrityError as error:
            found.demand(False, f"{name} tier: {error}")
        taken = book.allocated()
        in_flight = np.sort(np.fromiter(flying, np.int64, len(flying)))
        claimed = np.sort(np.concatenate([np.empty(0, np.int64), *claims]))
        claimed = claimed[claimed != NO_SLOT]
        owned = np.concatenate([*(slots[slots != NO_SLOT] for slots in resident), in_flight])
        owned.sort()
        found.slots += len(taken)
        found.demand_none(_repeated(owned), f"{name} tier: slots with several owners")
        found.demand_none(_lacking(taken, owned), f"{name} tier: allocated slots without an owner")
        found.demand_none(_lacking(owned, taken), f"{name} tier: slots with an owner that are not allocated")
        found.demand_none(_repeated(claimed), f"{name} tier: slots reserved twice")
        found.demand_none(_lacking(claimed, in_flight), f"{name} tier: reserved slots that were given away")
        if quiet:
            found.demand_none(
                _lacking(in_flight, claimed), f"{name} tier: slots in flight that no reservation or request has"
            )

    yield compare


def _claimed_slots(cache: TieredCache, tier: MemoryTier) -> list[Int64s]:
    """The slots in flight that a reservation, the quarantine or a request has; NO_SLOT among them."""
    if tier is cache.tiers.compute:
        return [np.array(frames, np.int64) for claim in cache.claims for _, _, frames in claim()]
    grants = chain.from_iterable(session.grants.values() for session in cache.leases.sessions.values())
    # A commit in slices removes a reservation's slots one after the other.
    reserved = [grant.slots.flatten() for grant in grants if isinstance(grant, Reservation)]
    return [np.fromiter(cache.quarantine.slots(), np.int64), *reserved]


def _holders(cache: TieredCache, trie: Trie) -> list[_Held]:
    """The holds on blocks of a trie now."""
    held: list[_Held] = [(hold.trie, hold.rows, hold.tier, hold.wanted) for hold in cache.holds if hold.trie is trie]
    for claim in cache.claims:
        held += [(other, rows, cache.tiers.compute, None) for other, rows, _ in claim() if other is trie]
    return held


def _audit_holds(found: Findings, cache: TieredCache, trie: Trie, tier: Tier) -> Steps[None]:
    copies = yield from memory_for_copies(trie.holds[: trie.rows, tier.level])
    quiet, there, held = cache.mover.quiet, copies.copy(trie.holds[: trie.rows, tier.level]), _holders(cache, trie)
    where, name = f"trie {trie.ordinal}: ", tier.name

    def compare() -> None:
        wanted = np.zeros_like(there)
        for _, rows, place, groups in held:
            if place is not tier:
                continue
            for group in trie.groups:
                chosen = rows if groups is None else rows[(groups & np.uint8(group.mask)) != 0]
                wanted[chosen, group.bit] += 1  # a holder's rows are different ones
        lacking, surplus = (there < wanted).any(axis=1), (there > wanted).any(axis=1)
        found.demand_none(
            np.flatnonzero(lacking), f"{where}rows with a hold, but not counted as held in the {name} tier"
        )
        if quiet:
            found.demand_none(np.flatnonzero(surplus), f"{where}rows counted as held in the {name} tier without a hold")

    yield compare


def _audit_keepers(found: Findings, cache: TieredCache, trie: Trie) -> Steps[None]:
    copies = yield from memory_for_copies(trie.keep[: trie.rows])
    quiet, keep, held = cache.mover.quiet, copies.copy(trie.keep[: trie.rows]), _holders(cache, trie)
    where = f"trie {trie.ordinal}: "

    def compare() -> None:
        wanted = np.zeros_like(keep)
        for _, rows, _, _ in held:
            wanted[rows] += 1
        found.demand_none(np.flatnonzero(keep < wanted), f"{where}rows with a hold, but not kept")
        if quiet:
            found.demand_none(np.flatnonzero(keep > wanted), f"{where}rows counted as kept without a hold")

    yield compare


def _repeated(ordered: Int64s) -> Int64s:
    """The numbers that occur more than once, each once."""
    return np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


def _lacking(ordered: Int64s, others: Int64s) -> Int64s:
    """The numbers in the first array that are not in the second; both ascend."""
    if not len(others):
        return np.unique(ordered)
    place = np.minimum(np.searchsorted(others, ordered), len(others) - 1)
    return np.unique(ordered[others[place] != ordered])
