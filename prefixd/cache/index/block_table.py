"""The geometry of a trie's blocks, and columns of that width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixd.cache.index.trie_table import TrieTable
from prefixd.cache.rules import MAX_GROUPS, FullAttention, GroupMask, GroupRule, kv_groups, needed_groups
from prefixd_swap.padded_rows import PaddedRows


class BlockTable(TrieTable):
    """Columns for blocks of one geometry: tokens a block, bytes and rules of its parts.

    Args:
        block_tokens: tokens a block.
        part_bytes: bytes of each part of a block.
        rules: the rule of each part; full attention by default. At most `MAX_GROUPS` different ones.
    """

    def __init__(self, block_tokens: int, part_bytes: Sequence[int], rules: Sequence[GroupRule] | None = None) -> None:
        self._set_geometry(block_tokens, part_bytes, rules)
        super().__init__(block_tokens, len(part_bytes), len(self.groups))

    def __len__(self) -> int:
        """Blocks."""
        return len(self._keys)

    def _set_geometry(self, block_tokens: int, part_bytes: Sequence[int], rules: Sequence[GroupRule] | None) -> None:
        self.groups = kv_groups(rules or [FullAttention()] * len(part_bytes))
        if len(self.groups) > MAX_GROUPS:
            raise ValueError(f"{len(self.groups)} KV groups with different rules, at most {MAX_GROUPS} are possible")
        self.block_tokens = block_tokens
        self.part_bytes = tuple(part_bytes)
        self.part_rows: tuple[PaddedRows | None, ...] = (None,) * len(part_bytes)
        """For each part how its bytes lie in the compute tier, if they are padded there."""
        self.all_groups = (1 << len(self.groups)) - 1
        self.part_mask = np.zeros(len(part_bytes), np.uint8)  # the group of each part
        for group in self.groups:
            self.part_mask[list(group.parts)] = group.mask
        self.group_bytes = np.array(
            [
                sum(nbytes for part, nbytes in enumerate(part_bytes) if mask & self.part_mask[part])
                for mask in range(self.all_groups + 1)
            ],
            np.int64,
        )
        """[2 ** groups]: bytes of the parts in the groups of each mask."""
        self.partial_groups = sum(group.mask for group in self.groups if not group.rule.lasting)
        """The groups of which a prefix does not need the bytes of all its blocks, as a mask."""
        self.has_rules = any(not isinstance(group.rule, FullAttention) for group in self.groups)
        """Whether a prefix may be usable though bytes of its blocks are missing."""
        self.block_bytes = sum(part_bytes)  # eviction policies read it

    def needed(self, blocks: int, first_block: int = 0) -> GroupMask:
        """[blocks - first_block]: the groups that a reader of `blocks` blocks needs from `first_block` on."""
        if self.has_rules:
            return needed_groups(self.groups, blocks)[first_block:]
        return np.full(blocks - first_block, self.all_groups, np.uint8)
