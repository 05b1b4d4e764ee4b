"""Does the cache still add up? Every block, slot, lease, reservation and hold is accounted for.

Tests call `check_integrity` after every scenario; `audit` is the same on a live daemon, while it works, and looks at
the index on disk too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prefixd.cache.cache import TieredCache
from prefixd.cache.groups import GroupMask
from prefixd.cache.index.trie import CPU, DISK, GPU, NO_SLOT, NONE, TIERS, Rows, Trie
from prefixd.cache.integrity_disk import compare_with_index, snapshot_of_disk
from prefixd.cache.sessions import Lease, Reservation
from prefixd.cache.tiers import TIER_NAMES
from prefixd_swap import IntegrityError, StorageError

_SHOWN = 3  # rows or slots named in one line
_QUIET_TRIES = 50
_QUIET_PAUSE_S = 0.02

Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class Audit:
    """What was accounted for, and what does not add up."""

    violations: list[str] = field(default_factory=list)
    blocks: int = 0
    slots: int = 0
    sessions: int = 0
    leases: int = 0
    reservations: int = 0

    def demand(self, holds: bool, otherwise: str) -> None:
        """Notes `otherwise` unless it holds."""
        if not holds:
            self.violations.append(otherwise)

    def demand_none(self, wrong: Iterable[int], what: str) -> None:
        """Notes rows or slots that are `what`, the first of them by number."""
        found = np.fromiter(wrong, np.int64)
        if len(found):
            shown = ", ".join(map(str, found[:_SHOWN].tolist()))
            more = f" and {len(found) - _SHOWN:,} more" if len(found) > _SHOWN else ""
            self.violations.append(f"{what}: {shown}{more}")


def check_integrity(cache: TieredCache) -> None:
    """Raises IntegrityError unless tries, tiers, leases and the slab store agree, as of now.

    For each tier: free + resident + in flight = capacity, every slot has one owner, and what is leased is held. For the
    tries: index, children and parents agree, and every block that is matchable has its prefix. When nothing is under
    way in the cache, holds and slots in flight are exactly those of leases, reservations and requests; else at least
    those.
    """
    found = audit_memory(cache)
    try:
        if cache.tiers.disk is not None:
            cache.tiers.disk.check_integrity()
    except IntegrityError as error:
        found.violations.append(f"disk tier: {error}")
    if found.violations:
        raise IntegrityError("; ".join(found.violations))


async def audit(cache: TieredCache) -> Audit:
    """`check_integrity` on a cache that works, and its disk index against its tries; collects what is wrong.

    Looks at memory at a moment when nothing is under way, if there is one within a second, and at the disk while no
    write or removal is.
    """
    for _ in range(_QUIET_TRIES):
        if cache.mover.quiet:
            break
        await asyncio.sleep(_QUIET_PAUSE_S)  # no event says that nobody is at work: there is one in between calls
    found = audit_memory(cache)
    if cache.tiers.disk is not None:
        try:
            found.violations += await cache.mover.disk.undisturbed(
                lambda: snapshot_of_disk(cache), lambda known: compare_with_index(known, cache.tiers.store)
            )
        except StorageError as error:
            found.violations.append(f"disk tier: {error}")
    return found


def audit_memory(cache: TieredCache) -> Audit:
    """Everything but the store: a second for a million blocks, in which nothing else runs."""
    found = Audit()
    for trie in cache.tries:
        _audit_trie(found, trie)
    expected = _Expected(found, cache)
    _audit_slots(found, cache, expected)
    _audit_holds(found, cache, expected)
    return found


def _audit_trie(found: Audit, trie: Trie) -> None:
    n, where = trie.rows, f"trie {trie.ordinal}: "
    rows = trie.used_rows()
    used = np.zeros(n, np.bool_)
    used[rows] = True
    free = np.array(trie.free, np.int64)
    found.demand_none(free[(free < 0) | (free >= n)], f"{where}free rows that do not exist")
    free = free[(free >= 0) & (free < n)]
    found.blocks += len(rows)
    found.demand(len(trie) == len(rows), f"{where}{len(trie)} keys lead to {len(rows)} rows")
    found.demand_none(free[used[free]], f"{where}rows that are used and free at once")
    found.demand(
        len(np.unique(free)) == len(free) and len(rows) + len(free) == n,
        f"{where}{n} rows, but {len(rows)} used and {len(free)} free",
    )
    found.demand_none(rows[trie.find_all(trie.keys(rows)) != rows], f"{where}rows that are not found under their keys")

    parent = trie.parent[rows].astype(np.int64)
    first = parent < 0
    lost = ~first & ((parent >= n) | ~used[np.clip(parent, 0, max(n - 1, 0))])
    found.demand_none(rows[lost], f"{where}rows that continue a block that does not exist")
    above = np.where(first | lost, 0, parent)
    found.demand_none(
        rows[np.where(first, -1 - parent, trie.namespace[above]) != trie.namespace[rows]],
        f"{where}rows that continue a block of another namespace",
    )
    depth = np.where(first, 0, trie.depth[above] + 1)
    found.demand_none(rows[trie.depth[rows] != depth], f"{where}rows with a wrong depth")
    inner = parent[~first & ~lost]
    found.demand_none(
        rows[np.bincount(inner, minlength=n)[rows] != trie.children[rows]], f"{where}rows that miscount their children"
    )

    whole, available = np.zeros(len(rows), np.uint8), np.zeros(len(rows), np.uint8)
    for tier in range(TIERS):
        bit, name = np.uint8(1 << tier), TIER_NAMES[tier]
        has = trie.slots[rows, tier] != NO_SLOT
        some = has.any(axis=1)
        marked = (trie.any_part[rows] & bit) != 0
        if tier == DISK:
            some |= marked  # a record without bytes: the block's descendants need it
        whole |= bit * has.all(axis=1)
        found.demand_none(rows[marked != some], f"{where}rows marked wrongly for the {name} tier")
        there = np.zeros(len(rows), np.uint8)
        for group in trie.groups:
            there |= np.uint8(group.mask) * has[:, list(group.parts)].all(axis=1)
        found.demand_none(
            rows[trie.there[rows, tier] != there], f"{where}rows with wrong KV groups for the {name} tier"
        )
        if trie.offered & (1 << tier):
            available |= there
        here = np.bincount(parent[some & ~first & ~lost], minlength=n)
        found.demand_none(
            rows[here[rows] != trie.tier_children[rows, tier]],
            f"{where}rows that miscount their children in the {name} tier",
        )
        found.demand_none(
            rows[(trie.holds[rows, tier] < 0).any(axis=1)],
            f"{where}rows released more often than held in the {name} tier",
        )
    found.demand_none(rows[trie.complete[rows] != whole], f"{where}rows that are not whole as marked")
    found.demand_none(
        rows[trie.available[rows] != available], f"{where}rows with KV groups that are not there as marked"
    )
    if len(trie.groups) == 1:
        nearest = np.full(len(rows), NONE, np.int8)
        for tier in (DISK, CPU, GPU):
            nearest[(whole & trie.offered & (1 << tier)) != 0] = tier
        found.demand_none(rows[trie.nearest[rows] != nearest], f"{where}rows with a wrong nearest tier")
    needed = (trie.children[rows] != 0) | (trie.keep[rows] != 0) | trie.pinned[rows]
    found.demand_none(rows[(trie.any_part[rows] == 0) & ~needed], f"{where}rows that have no copy and nobody needs")
    kept = trie.keep[rows] >= trie.holds[rows].max(axis=2).sum(axis=1)
    found.demand_none(rows[~kept], f"{where}rows that are held but not kept")


class _Expected:
    """What sessions and requests say is theirs: holds and retentions by row, slots in flight by tier."""

    def __init__(self, found: Audit, cache: TieredCache) -> None:
        self.holds = [np.zeros((trie.rows, TIERS, len(trie.groups)), np.int64) for trie in cache.tries]
        self.retained = [np.zeros(trie.rows, np.int64) for trie in cache.tries]
        self.in_flight: tuple[list[int], list[int]] = ([], [])
        for key, session in cache.leases.sessions.items():
            found.sessions += 1
            found.demand(key == session.id, f"session {session.id[:8]} is filed under another id")
            for grant_id, grant in session.grants.items():
                found.demand(
                    grant.id == grant_id and grant.session is session,
                    f"lease {grant.id} is filed with a session that is not its own",
                )
                if isinstance(grant, Lease):
                    found.leases += 1
                    lacking = grant.trie.lacking(grant.rows, CPU, grant.hold.wanted)
                    found.demand(not lacking.any(), f"lease {grant.id} covers blocks that left the CPU tier")
                elif isinstance(grant, Reservation):
                    found.reservations += 1
                    self.in_flight[CPU].extend(slot for block in grant.slots for slot in block)
        self.in_flight[CPU].extend(cache.quarantine.slots())
        for hold in cache.mover.placement.holds:
            if hold.tier is None:
                self.retained[hold.trie.ordinal][hold.rows] += 1
            else:
                self.hold(hold.trie, hold.rows, hold.tier, hold.wanted)
        for claim in cache.claims:
            for trie, rows, frames in claim():
                self.hold(trie, rows, GPU)
                self.in_flight[GPU].extend(frames)

    def hold(self, trie: Trie, rows: Rows, tier: int, wanted: GroupMask | None = None) -> None:
        """Adds one hold of each row, which are distinct."""
        self.retained[trie.ordinal][rows] += 1
        for group in trie.groups:
            chosen = rows if wanted is None else rows[(wanted & np.uint8(group.mask)) != 0]
            self.holds[trie.ordinal][chosen, tier, group.bit] += 1


def _audit_slots(found: Audit, cache: TieredCache, expected: _Expected) -> None:
    tiers = cache.tiers
    for tier, memory in ((GPU, tiers.gpu), (CPU, tiers.cpu)):
        if memory is None:
            continue
        name = TIER_NAMES[tier]
        try:
            memory.check_integrity()
        except IntegrityError as error:
            found.violations.append(f"{name} tier: {error}")
        resident = [trie.slots[trie.used_rows(), tier].ravel() for trie in cache.tries]
        in_flight = np.fromiter(tiers.in_flight[tier], np.int64)
        owned = np.concatenate([*resident, in_flight])
        owned = np.sort(owned[owned != NO_SLOT])
        taken = memory.allocated()
        found.slots += len(taken)
        found.demand_none(np.unique(owned[1:][owned[1:] == owned[:-1]]), f"{name} tier: slots with several owners")
        found.demand_none(np.setdiff1d(taken, owned), f"{name} tier: slots that are taken, but nobody's")
        found.demand_none(np.setdiff1d(owned, taken), f"{name} tier: slots that are somebody's, but not taken")
        claimed = np.sort(np.array(expected.in_flight[tier], np.int64))
        found.demand_none(np.unique(claimed[1:][claimed[1:] == claimed[:-1]]), f"{name} tier: slots reserved twice")
        found.demand_none(np.setdiff1d(claimed, in_flight), f"{name} tier: reserved slots that were given away")
        if cache.mover.quiet:
            found.demand_none(np.setdiff1d(in_flight, claimed), f"{name} tier: slots in flight that nobody is filling")


def _audit_holds(found: Audit, cache: TieredCache, expected: _Expected) -> None:
    quiet = cache.mover.quiet
    for trie in cache.tries:
        where, n = f"trie {trie.ordinal}: ", trie.rows
        holds, retained = expected.holds[trie.ordinal], expected.retained[trie.ordinal]
        for tier, name in enumerate(TIER_NAMES):
            wanted, there = holds[:, tier], trie.holds[:n, tier]
            lacking = np.flatnonzero((there < wanted).any(axis=1))
            surplus = np.flatnonzero((there > wanted).any(axis=1))
            found.demand_none(lacking, f"{where}rows leased or in use, but not held in the {name} tier")
            if quiet:
                found.demand_none(surplus, f"{where}rows held in the {name} tier by nobody")
        found.demand_none(np.flatnonzero(trie.keep[:n] < retained), f"{where}rows reserved upon, but not kept")
        if quiet:
            found.demand_none(np.flatnonzero(trie.keep[:n] > retained), f"{where}rows kept by nobody")
