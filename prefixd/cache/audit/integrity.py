"""Checks that every block, slot, lease, reservation and hold of the cache is accounted for.

Tests call `check_integrity` after every scenario. `audit` does the same on a live daemon while it works, and also
checks the index on disk. It never holds the event loop for long: it reads rows in slices, and if it needs all rows at
once (counters, owners), one callback copies some columns, and a thread compares them. So two checks may see the cache
at different moments; each checks a statement that is true at every moment.
"""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np

from prefixd.base.long_work.steps import Steps, do_at_once, do_in_slices, in_thread
from prefixd.cache.audit.findings import Findings
from prefixd.cache.audit.integrity_disk import compare_with_index, snapshot_of_disk
from prefixd.cache.audit.integrity_holds import audit_grants, audit_holds, audit_slots
from prefixd.cache.audit.integrity_stored import audit_stored
from prefixd.cache.audit.integrity_tenants import audit_tenants
from prefixd.cache.audit.integrity_trie import Bools, audit_trie
from prefixd.cache.cache import TieredCache
from prefixd.cache.index.keys.key_index import Ordinals
from prefixd.cache.index.trie import NO_SLOT, Trie
from prefixd_swap import IntegrityError, StorageError

_QUIET_TRIES = 50
_QUIET_PAUSE_S = 0.02


def check_integrity(cache: TieredCache) -> None:
    """Raises IntegrityError unless tries, tiers, leases and the slab store agree, as of now.

    For each tier: free + resident + in flight = capacity, every slot has one owner, and what is leased is held. For the
    tries: index, children and parents agree, and every matchable block has its prefix. If no work is under way in the
    cache, holds and slots in flight are exactly those of leases, reservations and requests; otherwise at least those.
    """
    found = Findings()
    do_at_once(_audit_memory(found, cache))
    violations = found.violations
    try:
        if cache.tiers.durable is not None:
            cache.tiers.durable.check_integrity()
    except IntegrityError as error:
        violations.append(f"disk tier: {error}")
    violations += _audit_remote(cache)
    if violations:
        raise IntegrityError("; ".join(violations))


async def audit(cache: TieredCache) -> Findings:
    """Does `check_integrity` on a cache in use, and compares its disk index with its tries; collects contradictions.

    Checks the holds at a moment when no work is under way, if there is one within a second, and the disk while no write
    or removal is under way.

    Raises:
        ExhaustedError: no thread can be started.
    """
    found = Findings()
    for _ in range(_QUIET_TRIES):
        if cache.mover.quiet:
            break
        await asyncio.sleep(_QUIET_PAUSE_S)  # no event tells when work ends; there are quiet moments between calls
    await do_in_slices(_audit_memory(found, cache))
    durable = cache.tiers.durable
    if durable is not None:
        try:
            async with cache.mover.disk.still():
                known = await do_in_slices(snapshot_of_disk(cache, durable))
                records = await durable.audit()
            # None: a commit has failed, and the tier reports a trouble
            wrong = [] if records is None else await in_thread(lambda: compare_with_index(known, records))
        except IntegrityError as error:
            wrong = [f"{durable.name} tier: {error}"]
        except StorageError as error:
            wrong = [f"disk tier: {error}"]
        for violation in wrong:
            found.demand(False, violation)
    return found


def _audit_remote(cache: TieredCache) -> list[str]:
    """Contradictions in the numbers of blocks in a shared store, which the tries have as slots."""
    remote = cache.tiers.remote
    if remote is None:
        return []
    try:
        remote.check_integrity()
    except IntegrityError as error:
        return [str(error)]
    named = sum(int((trie.slots[: trie.rows, remote.level] != NO_SLOT).sum()) for trie in cache.tries)
    if named != remote.entered_parts:
        return [f"{named} parts are marked for the {remote.name} tier, which counts {remote.entered_parts}"]
    return []


def _audit_memory(found: Findings, cache: TieredCache) -> Steps[None]:
    """Checks everything except the store; first the checks that need a quiet moment."""
    yield from audit_holds(found, cache)
    yield from audit_slots(found, cache)
    yield from audit_grants(found, cache)
    yield from audit_tenants(found, cache)
    if cache.tiers.durable is not None:
        yield from audit_stored(found, cache, cache.tiers.durable)
    for trie in list(cache.tries):
        yield from audit_trie(found, trie, cache.tiers, partial(_belong, cache, trie))


def _belong(cache: TieredCache, trie: Trie, ordinals: Ordinals) -> Bools:
    """Which of these ordinals are of namespaces whose blocks belong to the trie."""
    different, places = np.unique(ordinals, return_inverse=True)
    homes = [cache.namespaces.find_at(ordinal) for ordinal in different.tolist()]
    belong = np.array([home is not None and cache.trie(home) is trie for home in homes], np.bool_)
    found: Bools = belong[places]
    return found
