"""Audits the bytes counted for each tenant: compares them with the tries, the slots in flight, and the holds.

Also audits the count of blocks that wait to be written to disk. It is stored because every commit checks write-back's
limit, and a scan of the tries takes milliseconds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.base.long_work.steps import Steps
from prefixd.base.tenancy.tenants import Tenant
from prefixd.base.tiers import QUOTA_TIERS
from prefixd.cache.audit.findings import Findings
from prefixd.cache.cache import TieredCache
from prefixd.cache.index.scan import memory_for_copies
from prefixd.cache.index.trie import NO_SLOT, Rows, Trie
from prefixd.cache.index.trie_table import NOWHERE
from prefixd.cache.placement.tenant_use import Holders
from prefixd.cache.rules import GroupMask
from prefixd_swap.slots import round_to_slots
from prefixd_swap.tiers import Account, MemoryTier, Tier


def audit_tenants(found: Findings, cache: TieredCache) -> Steps[None]:
    """Checks the bytes that each tenant has cached, in flight and held, in each tier with quotas."""
    for tier in cache.tiers.own:
        if tier.level < len(QUOTA_TIERS):
            yield from _audit_cached(found, cache, tier)
            if isinstance(tier, MemoryTier):
                yield from _audit_in_flight(found, cache, tier)
            yield from _audit_held(found, cache, tier)
    yield from _audit_retained(found, cache)
    if cache.tiers.durable is not None:
        yield from _audit_queued(found, cache, cache.tiers.durable)


def _audit_cached(found: Findings, cache: TieredCache, tier: Tier) -> Steps[None]:
    use, level = cache.mover.use, tier.level
    coded = tier is cache.tiers.durable
    columns = [
        column
        for trie in cache.tries
        for column in (
            trie.slots[: trie.rows, level],
            trie.namespace[: trie.rows],
            trie.coded_bytes[: trie.rows if coded and trie.has_coded else 0],
        )
    ]
    copies = yield from memory_for_copies(*columns)
    counted = use.counted(tier)
    there = [
        (
            use.part_bytes(trie, tier),
            copies.copy(trie.slots[: trie.rows, level]),
            copies.copy(trie.namespace[: trie.rows]),
            copies.copy(trie.coded_bytes[: trie.rows if coded and trie.has_coded else 0]),
        )
        for trie in cache.tries
    ]
    owner_of = use.owner_of()

    def compare() -> None:
        nbytes = np.zeros_like(counted)
        for part_bytes, slots, namespaces, coded_bytes in there:
            rows = np.flatnonzero(namespaces != NOWHERE)
            sizes = np.broadcast_to(part_bytes, (len(rows), len(part_bytes)))
            if len(coded_bytes):
                sizes = np.where(coded_bytes[rows] > 0, round_to_slots(coded_bytes[rows]), sizes)
            np.add.at(nbytes, owner_of(namespaces[rows]), np.where(slots[rows] != NO_SLOT, sizes, 0).sum(axis=1))
        for ordinal in np.flatnonzero(nbytes != counted).tolist():
            name = use.tenants.at(ordinal).name
            found.demand(
                False,
                f"tenant {name} has {nbytes[ordinal]} bytes of blocks in the {tier.name} tier, and {counted[ordinal]} "
                "are counted",
            )

    yield compare


def _audit_in_flight(found: Findings, cache: TieredCache, tier: MemoryTier) -> Steps[None]:
    use, charges = cache.mover.use, list(tier.in_flight.values())
    accounts = {tier.unassigned: "no tenant"}
    for tenant in cache.tenants:
        accounts[use.moving(tenant, tier)] = f"tenant {tenant.name}"
        accounts[use.granted(tenant, tier)] = f"tenant {tenant.name}, granted"
    for session in cache.leases.sessions.values() if tier is cache.tiers.shared else ():
        accounts[session.reserved] = f"session {session.id[:8]}"
    counted = {account: account.nbytes for account in accounts}

    def compare() -> None:
        nbytes: Counter[Account] = Counter()
        for (account, slot_bytes), count in Counter(charges).items():
            whole: Account | None = account
            while whole is not None:
                nbytes[whole] += count * slot_bytes
                whole = whole.whole
        for account, whose in accounts.items():
            found.demand(
                counted[account] == nbytes[account],
                f"{whose}: {nbytes[account]} bytes are in flight in the {tier.name} tier, and {counted[account]} are "
                "counted",
            )

    yield compare


def _audit_held(found: Findings, cache: TieredCache, tier: Tier) -> Steps[None]:
    use = cache.mover.use
    columns = [(use.held.holders(trie, tier), trie.namespace) for trie in cache.tries]
    copies = yield from memory_for_copies(*(column for each in columns for column in each))
    there = [
        _Held(
            trie,
            copies.copy(use.held.holders(trie, tier)[: trie.rows]),
            copies.copy(trie.namespace[: trie.rows]),
            [(hold.rows, hold.wanted) for hold in cache.holds if (hold.trie, hold.counted) == (trie, tier)],
        )
        for trie in cache.tries
    ]
    owner_of, counted = use.owner_of(), [use.held.nbytes(tenant, tier) for tenant in cache.tenants]

    def compare() -> None:
        nbytes = np.zeros(len(counted), np.int64)
        for each in there:
            holders, groups = np.zeros_like(each.counted), np.zeros(len(each.counted), np.uint8)
            for rows, wanted in each.holds:
                for group in each.trie.groups:
                    holders[rows if wanted is None else rows[(wanted & np.uint8(group.mask)) != 0], group.bit] += 1
            found.demand_none(
                np.flatnonzero((holders != each.counted).any(axis=1)),
                f"trie {each.trie.ordinal}: rows of which holders are miscounted in the {tier.name} tier",
            )
            for group in each.trie.groups:
                groups |= np.where(holders[:, group.bit] > 0, np.uint8(group.mask), np.uint8(0))
            rows = np.flatnonzero(groups)
            np.add.at(nbytes, owner_of(each.namespaces[rows]), use.group_bytes(each.trie, tier)[groups[rows]])
        for ordinal in np.flatnonzero(nbytes != counted).tolist():
            found.demand(
                False,
                f"tenant {use.tenants.at(ordinal).name} holds {nbytes[ordinal]} bytes of blocks in the {tier.name} "
                f"tier, and {counted[ordinal]} are counted",
            )

    yield compare


def _audit_retained(found: Findings, cache: TieredCache) -> Steps[None]:
    there = [dict(trie.retained_bytes) for trie in cache.tries]
    use, owner_of, counted = cache.mover.use, cache.mover.use.owner_of(), +cache.retained.of_tenant
    total = cache.retained.nbytes

    def compare() -> None:
        nbytes: Counter[Tenant] = Counter()
        for of_trie in there:
            owners = owner_of(np.fromiter(of_trie, np.int32, len(of_trie))).tolist()
            for owner, more in zip(owners, of_trie.values(), strict=True):
                nbytes[use.tenants.at(owner)] += more
        found.demand(
            nbytes == counted and nbytes.total() == total,
            f"{_by_name(counted)} bytes, {total} in all, are counted as retained by tenant, not {_by_name(nbytes)}",
        )

    yield compare


def _audit_queued(found: Findings, cache: TieredCache, durable: Tier) -> Steps[None]:
    placement, use, shared = cache.mover.placement, cache.mover.use, cache.tiers.shared.level

    def columns(trie: Trie) -> list[npt.NDArray[Any]]:
        return [trie.there[: trie.rows], trie.expired[: trie.rows], trie.uses[: trie.rows], trie.namespace[: trie.rows]]

    copies = yield from memory_for_copies(*(column for trie in cache.tries for column in columns(trie)))
    tries = [(trie.group_bytes, *map(copies.copy, columns(trie))) for trie in cache.tries]
    counted, counted_of, owner_of = placement.queued_blocks, +placement.queued_bytes_of, use.owner_of()

    def compare() -> None:
        blocks, sums = 0, np.zeros(len(use.tenants.all), np.int64)
        for group_bytes, there, expired, uses, namespaces in tries:
            waiting = there[:, shared] & ~there[:, durable.level] & ~expired
            waiting[(namespaces == NOWHERE) | (uses < placement.admit_uses)] = 0
            rows = np.flatnonzero(waiting)
            blocks += len(rows)
            np.add.at(sums, owner_of(namespaces[rows]), group_bytes[waiting[rows]])
        nbytes = +Counter(dict(zip(use.tenants.all, sums.tolist(), strict=False)))
        found.demand(
            (blocks, nbytes) == (counted, counted_of),
            f"{counted} blocks, bytes by tenant {_by_name(counted_of)}, are counted as waiting to be written to disk, "
            f"not {blocks}, {_by_name(nbytes)}",
        )

    yield compare


def _by_name(nbytes: Counter[Tenant]) -> dict[str, int]:
    return {tenant.name: count for tenant, count in nbytes.items()}


@dataclass(frozen=True, slots=True)
class _Held:
    """The holder counts of a trie in one tier, and its holds."""

    trie: Trie
    counted: Holders
    namespaces: npt.NDArray[np.int32]
    holds: list[tuple[Rows, GroupMask | None]]
