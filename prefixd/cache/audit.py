"""`check_integrity`: does the cache still add up? Tests call it after every scenario."""

from __future__ import annotations

from collections import Counter

import numpy as np

from prefixd.cache.cache import TieredCache
from prefixd.cache.leases import Lease, Reservation
from prefixd.cache.trie import CPU, DISK, GPU, NO_SLOT, NONE, TIERS, Trie
from prefixd_swap import IntegrityError


def check_integrity(cache: TieredCache) -> None:
    """Raises IntegrityError unless trie, tiers and leases agree.

    For each tier: free + resident + in flight = capacity, every slot has one owner, and what is leased is held. For the
    trie: the index, the children and the parents agree, and every block that is matchable has its prefix.
    """
    for trie in cache.tries:
        _check_trie(trie)
    _check_slots(cache)
    _check_leases(cache)


def _check_trie(trie: Trie) -> None:
    rows = trie.used_rows()
    _demand(len(trie) == len(rows), f"{len(trie)} keys lead to {len(rows)} rows")
    _demand(not set(rows.tolist()) & set(trie.free), "a row is used and free at once")
    _demand(
        len(rows) + len(trie.free) == trie.rows, f"{trie.rows} rows, but {len(rows)} used and {len(trie.free)} free"
    )
    children: Counter[int] = Counter()
    by_tier: Counter[tuple[int, int]] = Counter()
    used = set(rows.tolist())
    for row in rows.tolist():
        parent = int(trie.parent[row])
        _demand(trie.find(trie.key(row)) == row, f"row {row} is not found under its key")
        _demand(parent < 0 or parent in used, f"block {trie.key(row).hex()} continues a block that does not exist")
        _demand(trie.depth[row] == (trie.depth[parent] + 1 if parent >= 0 else 0), f"row {row} has a wrong depth")
        children[parent] += 1
        for tier in range(TIERS):
            has = trie.slots[row, tier] != NO_SLOT
            bit = 1 << tier
            _demand(bool(trie.some[row] & bit) == bool(has.any()), f"row {row}: tier {tier} is marked wrongly")
            _demand(bool(trie.whole[row] & bit) == bool(has.all()), f"row {row}: tier {tier} is not whole as marked")
            by_tier[parent, tier] += bool(has.any())
            _demand(trie.holds[row, tier] >= 0, f"row {row} is released more often than held in tier {tier}")
        nearest = next((t for t in (GPU, CPU, DISK) if trie.whole[row] & trie.offered & (1 << t)), NONE)
        _demand(trie.nearest[row] == nearest, f"row {row}: nearest tier is {nearest}, not {trie.nearest[row]}")
        _demand(bool(trie.some[row]) or not trie.removable(row), f"row {row} has no copy and nobody needs it")
        _demand(trie.keep[row] >= trie.holds[row].sum(), f"row {row} is held but not kept")
    for row in rows.tolist():
        _demand(
            trie.children[row] == children[row], f"row {row} counts {trie.children[row]} children, has {children[row]}"
        )
        for tier in range(TIERS):
            _demand(trie.tier_children[row, tier] == by_tier[row, tier], f"row {row} miscounts children in tier {tier}")


def _check_slots(cache: TieredCache) -> None:
    tiers = cache.tiers
    if tiers.cpu is not None:
        tiers.cpu.check_integrity()
    if tiers.gpu is not None:
        tiers.gpu.check_integrity()
    if tiers.disk is not None:
        tiers.disk.check_integrity()
    for tier in (GPU, CPU, DISK):
        if not tiers.exists(tier):
            continue
        owned: Counter[int] = Counter(tiers.loose[tier] if tier != DISK else ())
        for trie in cache.tries:
            slots = trie.slots[trie.used_rows(), tier].ravel()
            owned.update(slots[slots != NO_SLOT].tolist())
        twice = [slot for slot, owners in owned.items() if owners > 1]
        _demand(not twice, f"tier {tier}: slots {twice[:5]} have several owners")
        if tier == DISK:  # the store accounts for its slots itself; a removal under way is still among them
            continue
        taken = tiers.frames.used_count if tier == GPU else tiers.arena.slots_used
        _demand(len(owned) == taken, f"tier {tier}: {taken} slots are taken, but {len(owned)} are accounted for")


def _check_leases(cache: TieredCache) -> None:
    held: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {
        trie.ordinal: np.zeros(trie.rows, np.int64) for trie in cache.tries
    }
    reserved: set[int] = set()
    for session in cache.leases.sessions.values():
        for grant in session.grants.values():
            if isinstance(grant, Lease):
                held[grant.trie.ordinal][grant.rows] += 1
                there = (grant.trie.whole[grant.rows] & (1 << CPU)) != 0
                _demand(bool(there.all()), f"lease {grant.id} covers blocks that left the CPU tier")
            elif isinstance(grant, Reservation):
                slots = {slot for block in grant.slots for slot in block}
                _demand(slots <= cache.tiers.loose[CPU], f"reservation {grant.id} has slots that are not its own")
                _demand(not slots & reserved, f"reservation {grant.id} shares slots with another one")
                reserved |= slots
    kept = list(cache.quarantine.slots())
    _demand(set(kept) <= cache.tiers.loose[CPU], "the quarantine has slots that are not its own")
    _demand(len(kept) == len(set(kept)) and not reserved & set(kept), "slots in quarantine have another owner, too")
    for trie in cache.tries:
        less = trie.holds[: trie.rows, CPU] < held[trie.ordinal]
        _demand(not less.any(), f"rows {np.flatnonzero(less)[:5]} are leased but not held")


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise IntegrityError(otherwise)
