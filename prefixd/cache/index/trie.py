"""The prefix trie: the cached blocks, their parents, and the tiers that have their bytes.

One trie has all namespaces of one geometry (tokens a block; bytes and rule of each part). It is a table: a block is a
row, a column is a numpy array, so that matching compares the tokens of a whole prompt, and eviction scans a whole tier,
in one call. Each file of the table has the columns of one subject:

    trie_table    memory of the columns, reuse of rows
    block_table   the geometry
    priorities    priorities of blocks
    copies        the parts that each tier has
    eviction      which copies may be evicted
    structure     blocks by key, parents and children
    trie          matching

The trie is *node-closed*: a block has a row only if every block before it has one. The *bytes* of a row may be missing,
all of them or those of some KV groups, if the groups' rules do not need them (`rules/`). A prefix can be used if every
group's rule allows its length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.eviction import lasting_copies as lasting_copies
from prefixd.cache.index.keys.block_keys import HASHED_AT_ONCE, BlockChain
from prefixd.cache.index.keys.key_index import Rows as Rows
from prefixd.cache.index.residency import LOCAL_TIERS as LOCAL_TIERS
from prefixd.cache.index.structure import Structure
from prefixd.cache.index.trie_table import CPU as CPU
from prefixd.cache.index.trie_table import DISK as DISK
from prefixd.cache.index.trie_table import GPU as GPU
from prefixd.cache.index.trie_table import NO_SLOT as NO_SLOT
from prefixd.cache.index.trie_table import NONE as NONE
from prefixd.cache.index.trie_table import REMOTE as REMOTE
from prefixd.cache.index.trie_table import TIERS as TIERS
from prefixd.cache.rules import Bools, GroupMask, GroupRule, longest_prefix, possible_lengths

Observer = Callable[["Trie", "int | Rows"], None]
"""Called with rows whose tiers may have changed; it reads them later."""


class Trie(Structure):
    """All blocks of one geometry.

    Args:
        block_tokens: tokens a block.
        part_bytes: bytes of each part of a block.
        ordinal: this trie's number among the cache's tries.
        rules: the rule of each part; full attention by default. At most `MAX_GROUPS` different ones.
    """

    def __init__(
        self,
        block_tokens: int,
        part_bytes: Sequence[int],
        ordinal: int = 0,
        rules: Sequence[GroupRule] | None = None,
    ) -> None:
        super().__init__(block_tokens, part_bytes, rules)
        self.ordinal = ordinal
        self.refused: dict[int, int] = {}
        """Row -> generation of blocks with wrong bytes (`RefusedBlocks`); no prompt matches from there on."""

    def reshape(self, block_tokens: int, part_bytes: Sequence[int], rules: Sequence[GroupRule]) -> None:
        """Changes the geometry of a trie without blocks; no namespace of the old geometry is registered any more."""
        if len(self):
            raise RuntimeError(f"trie {self.ordinal} cannot get another geometry: it has {len(self)} blocks")
        self._set_geometry(block_tokens, part_bytes, rules)
        self._set_widths(block_tokens, len(part_bytes), len(self.groups))

    # -- finding ------------------------------------------------------------------------------------------------

    def nodes(self, root: int, chain: BlockChain, limit: int | None = None, known: Rows | None = None) -> Rows:
        """The rows of the first blocks of `chain`, at most `limit`, with or without bytes.

        `known` are the rows of its first blocks as far as they are known: the search begins behind them.
        """
        begin = [np.empty(0, np.int64)] if known is None else [known]
        slices = [*begin, *self.walk(root, chain, limit, known)]
        full = [rows for rows in slices if len(rows)]
        return full[0] if len(full) == 1 else np.concatenate(slices)

    def walk(self, root: int, chain: BlockChain, limit: int | None = None, known: Rows | None = None) -> Iterator[Rows]:
        """As `nodes`, without `known`, in slices of 2,048 blocks or a little more; the last one has fewer, or none.

        Keys lead to candidates, whose token ids and parents are compared. So a collision of keys never returns another
        prompt's KV.

        Blocks may be removed between two slices: compare the generations of their rows at the end.
        """
        before, start = root, 0
        if known is not None and len(known):
            before, start = int(known[-1]), len(known)
        batches: list[Rows] = []
        blocks = 0
        find_all = partial(self.find_all, -1 - root)  # the root says which namespace
        for rows in chain.walk_batches(find_all, len(chain) if limit is None else limit, start):
            batches.append(rows)
            blocks += len(rows)
            if blocks >= HASHED_AT_ONCE:
                found = self._verified(before, chain, start, np.concatenate(batches))
                yield found
                if len(found) < blocks:
                    return
                before, start = int(found[-1]), start + blocks
                batches, blocks = [], 0
        yield self._verified(before, chain, start, np.concatenate([np.empty(0, np.int64), *batches]))

    def _verified(self, before: int, chain: BlockChain, start: int, rows: Rows) -> Rows:
        """The beginning of `rows` that has the tokens of this chain from block `start` on, and `before` as parent."""
        if not len(rows):
            return rows
        good = (self.tokens[rows] == chain.token_rows[start : start + len(rows)]).all(axis=1)
        parents = self.parent[rows]
        good[0] &= parents[0] == before
        good[1:] &= parents[1:] == rows[:-1]
        return rows if good.all() else rows[: int(good.argmin())]

    def usable(self, path: Rows, available: GroupMask | None = None) -> Rows:
        """The longest beginning of `path`, the rows of a prompt from its first block on, that every group allows.

        Args:
            path: rows from the first block on.
            available: [len(path)] groups that count as available; by default those that are in some tier.
        """
        if self.refused:
            path = path[: self.unrefused(path)]
        available = self.available[path] if available is None else available[: len(path)]
        if self.has_rules:
            return path[: longest_prefix(self.groups, available)]
        good = available == self.all_groups
        return path if good.all() else path[: int(good.argmin())]

    def usable_lengths(self, path: Rows) -> Bools:
        """[len(path) + 1]: which lengths of `path`, a prompt's rows from its first block on, every group allows."""
        usable = possible_lengths(self.groups, self.available[path])
        if self.refused:
            usable[self.unrefused(path) + 1 :] = False
        return usable

    def unrefused(self, rows: Rows, first_block: int = 0) -> int:
        """The number of rows, of a prompt from `first_block` on, before the first refused one."""
        there = (row for row, generation in self.refused.items() if self.generation[row] == generation)
        places = ((row, int(self.depth[row]) - first_block) for row in there)
        return min((at for row, at in places if 0 <= at < len(rows) and rows[at] == row), default=len(rows))

    def lacking(self, rows: Rows, tier: int, wanted: GroupMask | None = None) -> GroupMask:
        """[len(rows)]: which of the `wanted` groups (all by default) `tier` lacks of each block."""
        lacking: GroupMask = ~self.there[rows, tier] & (np.uint8(self.all_groups) if wanted is None else wanted)
        return lacking

    def missing(self, rows: Rows, tier: int, wanted: GroupMask | None = None) -> Rows:
        """The rows for which `tier` lacks a `wanted` group; any group by default."""
        chosen: Rows = rows[self.lacking(rows, tier, wanted) != 0]
        return chosen

    def distances(self, path: Rows) -> npt.NDArray[np.int8]:
        """[len(path)]: the tier from which each block of a usable prefix must be loaded: the nearest one with the bytes
        that the prefix needs; 0 for a block without needed bytes."""
        if not self.has_rules:
            return self.nearest[path]
        return self._nearest(path, self.needed(len(path)))
