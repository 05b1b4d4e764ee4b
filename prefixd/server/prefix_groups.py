"""A prefix group by group: what its KV groups are, and where they are."""

from __future__ import annotations

import numpy as np

from prefixd.cache import Namespace, Trie
from prefixd.cache.groups import GroupMask
from prefixd.cache.index.trie import TIERS, Rows
from prefixd.cache.rule_specs import words_of
from prefixd.v1 import admin_pb2 as pb
from prefixd.v1 import cache_pb2

_NAMES = 8


class GroupCounts:
    """Counts, over the rows of a prefix, the blocks of which some tier has each KV group."""

    def __init__(self, trie: Trie) -> None:
        self._trie = trie
        self._masks = np.zeros(trie.all_groups + 1, np.int64)  # blocks by the mask of the groups that are there

    def add(self, rows: Rows) -> None:
        """Takes in some of the rows."""
        self._masks += np.bincount(self._trie.available[rows], minlength=len(self._masks))

    @property
    def nbytes(self) -> int:
        """Bytes that are there of all rows."""
        return int((self._masks * self._trie.group_bytes).sum())

    def describe(self, namespace: Namespace) -> list[pb.GroupInfo]:
        """The groups, in the order of their bits in a mask."""
        masks = np.arange(len(self._masks))
        described = []
        for group in self._trie.groups:
            parts = [namespace.spec.parts[part] for part in group.parts]
            described.append(
                pb.GroupInfo(
                    names=list(dict.fromkeys(part.group for part in parts))[:_NAMES],
                    parts=len(parts),
                    rule=words_of(parts[0].rule),
                    block_bytes=int(self._trie.group_bytes[group.mask]),
                    blocks=int(self._masks[(masks & group.mask) != 0].sum()),
                )
            )
        return described


def groups_by_tier(trie: Trie, row: int) -> list[pb.TierGroups]:
    """The tiers that have a KV group of a block, with the groups."""
    there: GroupMask = trie.there[row]
    return [
        pb.TierGroups(
            tier=cache_pb2.Tier.Name(tier + 1),
            groups=[group.bit for group in trie.groups if int(there[tier]) & group.mask],
        )
        for tier in range(TIERS)
        if there[tier]
    ]
