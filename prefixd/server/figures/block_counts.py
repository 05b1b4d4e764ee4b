"""Counts the blocks of all tries: by tier, held ones, and the unused bytes of the GPU tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from prefixd.base.long_work.pacer import SLICE_ROWS, give_way
from prefixd.cache import TieredCache
from prefixd.cache.index.trie import TIERS
from prefixd.server.figures.coded_counts import CodedCounts
from prefixd.serving.request.kv_needs import KvNeeds, Unused


@dataclass(slots=True)
class BlockCounts:
    """Counts of blocks, from the columns of all tries."""

    blocks: list[int]
    """Blocks by tier."""
    held: list[int]
    """Blocks that are held in a tier, by tier."""
    unused: Unused
    """Unused bytes of the GPU tier's cached blocks."""
    on_gpu: Counter[int]
    """Blocks in the GPU tier, by the ordinal of their namespace."""
    coded: CodedCounts
    """Blocks that codecs have made smaller."""

    @classmethod
    async def of(cls, cache: TieredCache, needs: Sequence[KvNeeds]) -> Self:
        """Counts one slice of rows at a time, so that other tasks of the event loop run in between."""
        blocks, held, unused = [0] * TIERS, [0] * TIERS, Unused()
        on_gpu, compute, coded = Counter[int](), cache.tiers.compute.level, CodedCounts()
        for trie in list(cache.tries):
            for start in range(0, trie.rows, SLICE_ROWS):
                if start:
                    await give_way()
                rows = slice(start, min(start + SLICE_ROWS, trie.rows))
                here, held_here, by_namespace = trie.count_copies(rows, compute)
                for tier in range(TIERS):
                    blocks[tier] += here[tier]
                    held[tier] += held_here[tier]
                on_gpu.update(by_namespace)
                coded.add(trie, rows)
                # Models of one shape share a trie and need the same parts of its blocks.
                if (counting := next((each for each in needs if each.trie is trie), None)) is not None:
                    here_unused = counting.of_cached(trie, rows)
                    unused.spare += here_unused.spare
                    unused.unneeded += here_unused.unneeded
        return cls(blocks, held, unused, on_gpu, coded)
