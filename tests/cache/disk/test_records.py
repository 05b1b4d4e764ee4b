"""What the index on disk is told of blocks."""

from __future__ import annotations

import numpy as np

from prefixd.cache import Trie
from prefixd.cache.index.trie import CPU, DISK
from tests.cache.index.entering import enter_chain
from tests.rig import MakeRig


async def test_records_of_a_namespace_that_came_after_thousands_of_others(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8)
    records, tiers = rig.cache.mover.disk.records, rig.cache.tiers
    trie = Trie(rig.trie.block_tokens, (64, 64))  # small, so that it has fewer rows than there are namespaces
    chain = rig.cache.chain(rig.namespace, np.arange(3 * trie.block_tokens, dtype=np.uint32).tobytes())
    rows = enter_chain(trie, chain, parent=-5000)
    trie.put_copies(rows, CPU, np.array([[0, 64], [128, 192], [256, 320]]), 0.0)
    trie.put_copies(rows, DISK, np.array([[7, -1], [8, -1], [9, -1]]), 0.0)
    for record in (
        records.expected(trie, rows),
        records.new_blocks(trie, rows, tiers.shared, np.zeros(3, np.uint8)),
    ):
        assert [each.parent for each in record] == [b"", chain.key(0), chain.key(1)]
        assert [each.key for each in record] == [chain.key(0), chain.key(1), chain.key(2)]
        assert [each.tokens for each in record] == [chain.block(0), chain.block(1), chain.block(2)]
        assert [each.depth for each in record] == trie.depth[rows].tolist()
        slots = [[getattr(part, "slot", None) for part in each.parts] for each in record]
        assert slots == [[7, None], [8, None], [9, None]]
