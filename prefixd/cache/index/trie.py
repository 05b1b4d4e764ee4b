"""The prefix trie: which blocks exist, what they continue, and where their bytes are.

One trie holds all namespaces of one geometry (tokens a block, bytes of each part). It is a table: a block is a row, a
column is a numpy array, so that matching compares the tokens of a whole prompt, and eviction scans a whole tier, in
one call.

A row is *kept* while anything needs the block to exist (`keep`), and *held* in a tier while somebody relies on the copy
there (`holds`); holding a copy that is still on its way is allowed and protects it from the moment it arrives. Every
hold also keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.key_index import Rows as Rows
from prefixd.cache.index.keys import BlockChain
from prefixd.cache.index.trie_table import NOWHERE, TrieTable
from prefixd.cache.index.trie_table import TIERS as TIERS

GPU, CPU, DISK, NONE = 0, 1, 2, 3
NO_SLOT = -1

# Nearest tier of a block by the bit mask of the tiers that have all of its parts.
_NEAREST = np.array([NONE, GPU, CPU, GPU, DISK, GPU, CPU, GPU], dtype=np.int8)


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a prompt: one row a block, from the first block on."""

    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)


Observer = Callable[["Trie", "int | Rows"], None]
"""Told of the rows whose blocks can be had from other tiers than before, perhaps; it looks at them later."""


class Trie(TrieTable):
    """All blocks of one geometry (tokens a block, bytes of its parts).

    Args:
        block_tokens: tokens a block.
        part_bytes: bytes of each part of a block.
        ordinal: this trie's number among the cache's tries.
    """

    def __init__(self, block_tokens: int, part_bytes: Sequence[int], ordinal: int = 0) -> None:
        super().__init__(block_tokens, len(part_bytes))
        self.block_tokens = block_tokens
        self.part_bytes = tuple(part_bytes)
        self.ordinal = ordinal
        self.offered = 0b111  # tiers whose copies count as there
        self.observer: Observer | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes | None) -> bool:
        return key is not None and self._keys.find(key) is not None

    # -- finding ------------------------------------------------------------------------------------------------

    def match(self, root: int, chain: BlockChain, limit: int | None = None) -> Match:
        """The longest prefix of `chain` whose blocks all have all their bytes in some tier.

        Keys lead to candidates; token ids and parents are then compared, so that a collision of keys can never hand
        out another prompt's KV.
        """
        found = chain.walk(self._keys.find_all, len(chain) if limit is None else limit)
        return Match(self.verified(root, chain, found))

    def verified(self, root: int, chain: BlockChain, rows: Rows) -> Rows:
        """The beginning of `rows` that really is this chain's and has its bytes."""
        if not len(rows):
            return rows
        wanted = np.frombuffer(chain.blocks(len(rows)), np.uint32).reshape(len(rows), self.block_tokens)
        good = (self.tokens[rows] == wanted).all(axis=1)
        good &= self.nearest[rows] != NONE
        parents = self.parent[rows]
        good[0] &= parents[0] == root
        good[1:] &= parents[1:] == rows[:-1]
        return rows if good.all() else rows[: int(good.argmin())]

    def find(self, key: bytes) -> int | None:
        """The row of the block that has this key; its tokens and its parent may be another prompt's."""
        return self._keys.find(key)

    def find_all(self, keys: npt.NDArray[np.uint8]) -> Rows:
        """`find` for [m, 16] keys at once, -1 where there is none."""
        return self._keys.find_all(keys)

    def find_by_digits(self, digits: str) -> Rows:
        """The rows whose keys begin with these hex digits."""
        rows = self.used_rows()
        keys = self._keys.keys(rows)
        whole = np.frombuffer(bytes.fromhex(digits[: len(digits) // 2 * 2]), np.uint8)
        same = (keys[:, : len(whole)] == whole).all(axis=1)
        if len(digits) % 2:
            same &= keys[:, len(whole)] >> 4 == int(digits[-1], 16)
        chosen: Rows = rows[same]
        return chosen

    def key(self, row: int) -> bytes:
        """Key of the block in `row`."""
        return self._keys.key(row)

    def keys(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """[len(rows), 16]: keys of the blocks in `rows`."""
        return self._keys.keys(rows)

    def path(self, row: int) -> Rows:
        """The rows from the first block of the prefix to `row`."""
        path = []
        while row >= 0:
            path.append(row)
            row = int(self.parent[row])
        return np.array(path[::-1], np.int64)

    def ancestry(self, rows: Rows) -> Rows:
        """`rows` and every block that they continue, each once."""
        seen: set[int] = set()
        for row in rows.tolist():
            while row >= 0 and row not in seen:
                seen.add(row)
                row = int(self.parent[row])
        return np.fromiter(seen, np.int64, len(seen))

    def subtree(self, roots: Rows) -> list[int]:
        """`roots`, different rows, and everything that continues them, each row once and parents before children."""
        if not self.children[roots].any():
            found: list[int] = roots.tolist()
            return found
        rows = self.used_rows()
        rows = rows[np.argsort(self.parent[rows])]  # siblings side by side
        parents = self.parent[rows]
        under = np.zeros(self.rows, np.bool_)  # of which rows it is known already that they belong here
        level = roots
        while len(level):
            under[level] = True
            level = level[self.children[level] > 0]
            first = np.searchsorted(parents, level)
            count = self.children[level]
            starts = np.repeat(first - np.cumsum(count) + count, count)
            level = rows[starts + np.arange(len(starts))]
            level = level[~under[level]]
        below = np.flatnonzero(under)
        ordered: list[int] = below[np.argsort(self.depth[below], kind="stable")].tolist()
        return ordered

    # -- adding and removing ------------------------------------------------------------------------------------

    def insert(self, parent: int, namespace: int, key: bytes, token_ids: bytes, now_s: float) -> int | None:
        """The row of the block that continues `parent` with `token_ids`; a new one when there is none.

        `parent` is a row, or the namespace's root for first blocks. None when another block has this key: the newcomer
        cannot be cached.
        """
        tokens = np.frombuffer(token_ids, np.uint32)
        row = self._keys.find(key)
        if row is not None:
            same = self.parent[row] == parent and bool((self.tokens[row] == tokens).all())
            return row if same else None
        row = self.take_row()
        self._keys.insert(key, row)
        self.tokens[row] = tokens
        self.parent[row] = parent
        self.namespace[row] = namespace
        self.depth[row] = self.depth[parent] + 1 if parent >= 0 else 0
        self.children[row] = 0
        self.keep[row] = 0
        self.pinned[row] = False
        self.last_used[row] = now_s
        self.some[row] = self.whole[row] = 0
        self.nearest[row] = NONE
        self.slots[row] = NO_SLOT
        self.checksums[row] = 0
        self.sealed[row] = False
        self.holds[row] = 0
        self.tier_children[row] = 0
        self.entered[row] = 0.0
        if parent >= 0:
            self.children[parent] += 1
        return row

    def insert_all(
        self,
        rows: Rows,
        parents: Rows,
        namespaces: npt.NDArray[np.int64],
        depths: npt.NDArray[np.int64],
        keys: npt.NDArray[np.uint8],
        tokens: npt.NDArray[np.uint32],
        now_s: float,
    ) -> None:
        """Puts m blocks that are not there into rows just taken; parents are there, or among them and before them.

        What a row without a block has as 0 (`remove`) stays as it is, and untouched memory stays untaken.

        Args:
            rows: [m], from `take_rows`.
            parents: [m], rows or roots.
            namespaces: [m] ordinals.
            depths: [m], one more than the parents'.
            keys: [m, 16], all different.
            tokens: [m, block_tokens].
            now_s: the time of their last use.
        """
        self._keys.insert_all(keys, rows)
        self.tokens[rows] = tokens
        self.parent[rows] = parents
        self.namespace[rows] = namespaces
        self.depth[rows] = depths
        self.last_used[rows] = now_s
        self.nearest[rows] = NONE
        self.slots[rows] = NO_SLOT
        self.checksums[rows] = 0
        inner = parents >= 0
        np.add.at(self.children, parents[inner], 1)

    def removable(self, row: int) -> bool:
        """Whether the block exists and nothing continues, keeps or pins it."""
        if self.children[row] or self.keep[row] or self.pinned[row]:
            return False
        return bool(self.namespace[row] != NOWHERE)

    def remove(self, row: int) -> None:
        """Forgets a block that has no copy left and is removable.

        Ancestors that were without copies and stayed only for its sake go with it.
        """
        if self.some[row] or not self.removable(row):
            raise RuntimeError(f"row {row} was removed while it has no block, or one with copies, children or keepers")
        while True:
            self._keys.remove(row)
            self.namespace[row] = NOWHERE
            self.generation[row] += 1
            self.free.append(row)
            row = int(self.parent[row])
            if row < 0:
                return
            self.children[row] -= 1
            if self.some[row] or not self.removable(row):
                return

    # -- copies -------------------------------------------------------------------------------------------------

    def put_copy(self, row: int, tier: int, slots: Sequence[int], now_s: float) -> None:
        """Records where the parts are in `tier`; NO_SLOT leaves a part as it is."""
        place = self.slots[row, tier]
        for part, slot in enumerate(slots):
            if slot != NO_SLOT:
                place[part] = slot
        bit = 1 << tier
        if not self.some[row] & bit:
            self.some[row] |= bit
            self.entered[row, tier] = now_s
            parent = int(self.parent[row])
            if parent >= 0:
                self.tier_children[parent, tier] += 1
        if (place != NO_SLOT).all():
            self.whole[row] |= bit
            self.nearest[row] = _NEAREST[self.whole[row] & self.offered]
            if self.observer is not None:
                self.observer(self, row)

    def drop_copy(self, row: int, tier: int) -> list[int]:
        """Forgets the copy in `tier` and returns its slots (NO_SLOT for parts that had none)."""
        slots: list[int] = self.slots[row, tier].tolist()
        bit = 1 << tier
        if self.some[row] & bit:
            self.some[row] &= ~bit & 7
            self.whole[row] &= ~bit & 7
            self.slots[row, tier] = NO_SLOT
            self.nearest[row] = _NEAREST[self.whole[row] & self.offered]
            if tier == CPU:
                self.sealed[row] = False
            parent = int(self.parent[row])
            if parent >= 0:
                self.tier_children[parent, tier] -= 1
            if self.observer is not None:
                self.observer(self, row)
        return slots

    def put_copies(self, rows: Rows, tier: int, slots: npt.NDArray[np.int64], now_s: float) -> None:
        """Records whole copies, [m, parts] slots, of m rows that have none in `tier`."""
        self.slots[rows, tier] = slots
        self.some[rows] |= np.uint8(1 << tier)
        self.whole[rows] |= np.uint8(1 << tier)
        self.nearest[rows] = _NEAREST[self.whole[rows] & np.uint8(self.offered)]
        self.entered[rows, tier] = now_s
        parents = self.parent[rows]
        np.add.at(self.tier_children[:, tier], parents[parents >= 0], 1)
        if self.observer is not None:
            self.observer(self, rows)

    def offer(self, tier: int, offered: bool) -> None:
        """Whether copies in `tier` count as there: blocks that have no other copy are matched no more if not."""
        self.offered = self.offered | 1 << tier if offered else self.offered & ~(1 << tier)
        self.nearest[: self.rows] = _NEAREST[self.whole[: self.rows] & np.uint8(self.offered)]
        if self.observer is not None:
            self.observer(self, self.copies(tier))

    def set_checksums(self, row: int, checksums: Sequence[int]) -> None:
        """Records the checksums of the copy on disk. A CPU copy that has others is sealed no more."""
        new = np.array(checksums, np.uint64)
        self.sealed[row] &= self.checksums[row] == new
        self.checksums[row] = new

    def seal(self, row: int, part: int, checksum: int) -> None:
        """Records the checksum of a part's bytes in the CPU tier, unless a copy on disk has another."""
        if self.slots[row, DISK, part] == NO_SLOT:
            self.checksums[row, part] = checksum
        self.sealed[row, part] = int(self.checksums[row, part]) == checksum

    def has(self, row: int, tier: int) -> bool:
        """Whether `tier` has every part of the block."""
        return bool(self.whole[row] & (1 << tier))

    def missing(self, rows: Rows, tier: int) -> Rows:
        """The rows of which `tier` lacks a part."""
        lacking: Rows = rows[(self.whole[rows] & (1 << tier)) == 0]
        return lacking

    # -- protection ---------------------------------------------------------------------------------------------

    def hold(self, rows: Rows, tier: int) -> None:
        """Protects the copies in `tier`, present or on their way. Rows are distinct."""
        self.holds[rows, tier] += 1
        self.keep[rows] += 1

    def unhold(self, rows: Rows, tier: int) -> None:
        """Ends one hold of each row."""
        self.holds[rows, tier] -= 1
        self.keep[rows] -= 1

    def retain(self, rows: Rows) -> None:
        """Keeps the blocks in existence, wherever they are."""
        self.keep[rows] += 1

    def unretain(self, rows: Rows) -> None:
        """Ends one retention of each row."""
        self.keep[rows] -= 1

    def touch(self, rows: Rows, now_s: float) -> None:
        """Marks a prefix as used. Touching whole prefixes keeps a parent at least as recent as its children."""
        self.last_used[rows] = now_s

    # -- eviction -----------------------------------------------------------------------------------------------

    def evictable(self, tier: int, *, demotable: bool) -> Rows:
        """Rows whose copy in `tier` may go now: not held, and no child has a copy there (leaves first).

        A copy that is the block's last may only go when the block itself may, or when it can be written a tier down,
        which takes all of its parts.
        """
        n = self.rows
        bit = np.uint8(1 << tier)
        can = (self.some[:n] & bit) != 0
        can &= self.holds[:n, tier] == 0
        can &= self.tier_children[:n, tier] == 0
        elsewhere = (self.some[:n] & ~bit & np.uint8(7)) != 0
        may_vanish = (self.children[:n] == 0) & (self.keep[:n] == 0) & ~self.pinned[:n]
        may_go_down = (self.whole[:n] & bit) != 0 if demotable else np.zeros(n, np.bool_)
        can &= elsewhere | may_vanish | may_go_down
        return np.flatnonzero(can)

    def copies(self, tier: int, without: int | None = None) -> Rows:
        """Rows with every part in `tier` (and no part in `without`)."""
        n = self.rows
        rows = (self.whole[:n] & np.uint8(1 << tier)) != 0
        if without is not None:
            rows &= (self.some[:n] & np.uint8(1 << without)) == 0
        return np.flatnonzero(rows)
