"""Many blocks dropped from a tier in one call: the same go as one by one, their slots with them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from prefixd.base.tenancy.tenants import Tenants
from prefixd.cache import Tiers, Trie
from prefixd.cache.placement.placement import Placement
from prefixd.cache.placement.tenant_use import TenantUse
from prefixd_swap import CpuArena, UseHistory
from prefixd_swap.eviction import Lru
from tests.cache.index.entering import enter_block

PART_BYTES = 4096


@pytest.fixture
def arena() -> Iterator[CpuArena]:
    made = CpuArena(64 * PART_BYTES)
    yield made
    made.close()


class Chain:
    """The blocks of one prompt; those of `there` have a copy in the CPU tier."""

    def __init__(self, arena: CpuArena, blocks: int, there: set[int]) -> None:
        self.trie = Trie(1, (PART_BYTES,), 0)
        tiers = Tiers.local(arena)
        self.placement = Placement(tiers, lambda: 0.0, UseHistory(Lru(), 0), TenantUse(tiers, Tenants()))
        self.rows: list[int] = []
        for block in range(blocks):
            parent = self.rows[-1] if self.rows else -1
            row = enter_block(self.trie, block.to_bytes(16, "little"), block.to_bytes(4, "little"), parent)
            assert row is not None
            self.rows.append(row)
            if block in there:
                slots = self.placement.tiers.shared.allocate((PART_BYTES,), 1)
                self.placement.put(self.trie, np.array([row]), self.placement.tiers.shared, slots)

    def drop(self, *blocks: int, with_page: bool = False) -> int:
        rows = [self.rows[block] for block in blocks]
        return self.placement.drop(self.trie, rows, self.placement.tiers.shared, with_page=with_page)


def test_a_whole_prompt_goes_in_one_call(arena: CpuArena) -> None:
    chain = Chain(arena, 6, set(range(6)))
    assert chain.drop(5, 4, 3, 2) == 4
    assert len(chain.trie) == 2 and arena.pages.used_bytes == 2 * PART_BYTES
    assert chain.drop(1, 0) == 2
    assert not len(chain.trie) and not arena.pages.used_bytes


def test_a_block_goes_with_what_continued_it_over_blocks_without_a_copy(arena: CpuArena) -> None:
    chain = Chain(arena, 4, {1, 3})
    assert chain.drop(3, 1) == 2, "block 2 has no copy and goes with block 3, so that block 1 is the last one"
    assert not len(chain.trie) and not arena.pages.used_bytes


def test_only_with_its_page_does_a_block_leave_its_continuation_behind(arena: CpuArena) -> None:
    chain = Chain(arena, 3, {0, 1, 2})
    assert chain.drop(1, 0) == 0 and arena.pages.used_bytes == 3 * PART_BYTES
    chain.trie.retain(np.array([chain.rows[0]]))
    assert chain.drop(1, 0, with_page=True) == 1, "block 0 is kept by somebody"
    assert len(chain.trie) == 3 and arena.pages.used_bytes == 2 * PART_BYTES
