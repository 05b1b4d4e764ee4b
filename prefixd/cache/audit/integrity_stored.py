"""Audits what is counted as stored on disk: compares it with the sizes in the tries."""

from __future__ import annotations

import numpy as np

from prefixd.base.long_work.steps import Steps
from prefixd.cache.audit.findings import Findings
from prefixd.cache.cache import TieredCache
from prefixd.cache.index.scan import memory_for_copies
from prefixd.cache.index.trie import NO_SLOT
from prefixd.cache.index.trie_table import NOWHERE
from prefixd_swap.tiers import Tier


def audit_stored(found: Findings, cache: TieredCache, durable: Tier) -> Steps[None]:
    """Checks the stored bytes on disk of each tenant, and the bytes that they are decoded to."""
    use, level = cache.mover.use, durable.level
    columns = [
        column
        for trie in cache.tries
        for column in (
            trie.slots[: trie.rows, level],
            trie.namespace[: trie.rows],
            trie.coded_bytes[: trie.rows if trie.has_coded else 0],
        )
    ]
    copies = yield from memory_for_copies(*columns)
    there = [
        (
            np.array(trie.part_bytes, np.int64),
            copies.copy(trie.slots[: trie.rows, level]),
            copies.copy(trie.namespace[: trie.rows]),
            copies.copy(trie.coded_bytes[: trie.rows if trie.has_coded else 0]),
        )
        for trie in cache.tries
    ]
    counted, owner_of = use.stored.counted(len(use.tenants.all)), use.owner_of()

    def compare() -> None:
        nbytes = np.zeros_like(counted)
        for part_bytes, slots, namespaces, coded_bytes in there:
            rows = np.flatnonzero(namespaces != NOWHERE)
            has, sizes = slots[rows] != NO_SLOT, np.broadcast_to(part_bytes, (len(rows), len(part_bytes)))
            stored = np.where(coded_bytes[rows] > 0, coded_bytes[rows], sizes) if len(coded_bytes) else sizes
            for column, of_parts in enumerate((stored, sizes)):
                np.add.at(nbytes[:, column], owner_of(namespaces[rows]), np.where(has, of_parts, 0).sum(axis=1))
        for ordinal in np.flatnonzero((nbytes != counted).any(axis=1)).tolist():
            stored, exact = nbytes[ordinal].tolist()
            has_stored, has_exact = counted[ordinal].tolist()
            found.demand(
                False,
                f"of tenant {use.tenants.at(ordinal).name} {stored} bytes are stored in the {durable.name} tier, "
                f"{exact} decoded, and {has_stored} and {has_exact} are counted",
            )

    yield compare
