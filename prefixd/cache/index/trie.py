"""The prefix trie: which blocks exist, what they continue, and where their bytes are.

One trie holds all namespaces of one geometry (tokens a block; bytes and rule of each part). It is a table: a block is a
row, a column is a numpy array, so that matching compares the tokens of a whole prompt, and eviction scans a whole tier,
in one call.

The trie is *node-closed*: a block has a row only if every block before it has one. The *bytes* of a row may be missing,
all of them or those of some KV groups, where the groups' rules do not need them (`groups/`). A prefix can be used
when every group's rule allows its length.

A row is *kept* while anything needs the block to exist (`keep`), and a group of it is *held* in a tier while somebody
relies on its bytes there (`holds`); holding bytes that are still on their way is allowed and protects them from the
moment they arrive. Every hold also keeps. `placement/holds.py` counts who holds what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.children import Descendants, link, unlink_all
from prefixd.cache.index.key_index import Ordinals
from prefixd.cache.index.key_index import Rows as Rows
from prefixd.cache.index.keys import HASHED_AT_ONCE, BlockChain
from prefixd.cache.index.trie_table import NO_SLOT as NO_SLOT
from prefixd.cache.index.trie_table import NOWHERE, TrieTable
from prefixd.cache.index.trie_table import TIERS as TIERS
from prefixd.cache.rules import (
    MAX_GROUPS,
    Bools,
    FullAttention,
    GroupMask,
    GroupRule,
    expired_groups,
    kv_groups,
    longest_prefix,
    needed_groups,
    possible_lengths,
)

GPU, CPU, DISK, REMOTE, NONE = 0, 1, 2, 3, 4
_WALK_STEPS = 1 << 20

# Nearest tier of a block by the bit mask of the tiers that have all of its parts.
_NEAREST = np.array(
    [next((tier for tier in range(TIERS) if mask & 1 << tier), NONE) for mask in range(1 << TIERS)], dtype=np.int8
)
_ALL_TIERS = (1 << TIERS) - 1
LOCAL_TIERS = _ALL_TIERS & ~(1 << REMOTE)
"""The tiers whose copies are this host's own, a bit each: nobody else may delete them."""


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a prompt: one row a block, from the first block on."""

    rows: Rows

    def __len__(self) -> int:
        return len(self.rows)


Observer = Callable[["Trie", "int | Rows"], None]
"""Told of the rows whose blocks can be had from other tiers than before, perhaps; it looks at them later."""


class Trie(TrieTable):
    """All blocks of one geometry (tokens a block, bytes and rules of its parts).

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
        self._set_geometry(block_tokens, part_bytes, rules)
        super().__init__(block_tokens, len(part_bytes), len(self.groups))
        self.ordinal = ordinal
        self.offered = _ALL_TIERS  # tiers whose copies count as there
        self.prioritized = 0
        """Blocks that have a priority, or had one until it was over and nobody has noticed yet."""
        self.retained_bytes: Counter[int] = Counter()
        """Likewise, of those with a priority above 0 the bytes that some tier has, each once, by namespace."""
        self.on_retained: Callable[[int, int], None] = lambda namespace, change: None
        """Called with a namespace's ordinal and the change of its `retained_bytes`."""
        self.observer: Observer | None = None
        self.refused: dict[int, int] = {}
        """Rows, with their generations, from which on no prompt goes on: their bytes are wrong (`RefusedBlocks`)."""

    def reshape(self, block_tokens: int, part_bytes: Sequence[int], rules: Sequence[GroupRule]) -> None:
        """Becomes a trie of another geometry; it has no blocks, and no namespace of its old geometry is known."""
        if len(self):
            raise RuntimeError(f"trie {self.ordinal} was to get another geometry while it has {len(self)} blocks")
        self._set_geometry(block_tokens, part_bytes, rules)
        self._set_widths(block_tokens, len(part_bytes), len(self.groups))

    def _set_geometry(self, block_tokens: int, part_bytes: Sequence[int], rules: Sequence[GroupRule] | None) -> None:
        self.groups = kv_groups(rules or [FullAttention()] * len(part_bytes))
        if len(self.groups) > MAX_GROUPS:
            raise ValueError(f"{len(self.groups)} KV groups with different rules, at most {MAX_GROUPS} are possible")
        self.block_tokens = block_tokens
        self.part_bytes = tuple(part_bytes)
        self.all_groups = (1 << len(self.groups)) - 1
        self.part_mask = np.zeros(len(part_bytes), np.uint8)  # of each part, the group that it belongs to
        for group in self.groups:
            self.part_mask[list(group.parts)] = group.mask
        self.group_bytes = np.array(
            [
                sum(nbytes for part, nbytes in enumerate(part_bytes) if mask & self.part_mask[part])
                for mask in range(self.all_groups + 1)
            ],
            np.int64,
        )
        """[2 ** groups]: bytes of a block's parts that belong to the groups of a mask."""
        self.partial_groups = sum(group.mask for group in self.groups if not group.rule.lasting)
        """The groups of which a prefix does not need the bytes of all its blocks."""
        self.has_rules = any(not isinstance(group.rule, FullAttention) for group in self.groups)
        """Whether a prefix may be usable though bytes of its blocks are missing."""
        self.block_bytes = sum(part_bytes)

    def __len__(self) -> int:
        return len(self._keys)

    # -- finding ------------------------------------------------------------------------------------------------

    def match(self, root: int, chain: BlockChain, limit: int | None = None) -> Match:
        """The longest prefix of `chain`, at most `limit` blocks, that every KV group's rule allows.

        It holds the event loop for some 0.5 us a block: see `paths.find_path` for prompts of any length.
        """
        return Match(self.usable(self.nodes(root, chain, limit)))

    def nodes(self, root: int, chain: BlockChain, limit: int | None = None, known: Rows | None = None) -> Rows:
        """The rows of the first blocks of `chain`, at most `limit`, wherever their bytes are or are not.

        `known` are the rows of its first blocks, if any are known: the search goes on behind them.
        """
        begin = [np.empty(0, np.int64)] if known is None else [known]
        slices = [*begin, *self.walk(root, chain, limit, known)]
        full = [rows for rows in slices if len(rows)]
        return full[0] if len(full) == 1 else np.concatenate(slices)

    def walk(self, root: int, chain: BlockChain, limit: int | None = None, known: Rows | None = None) -> Iterator[Rows]:
        """`nodes`, but those `known`, in slices of 2,048 blocks or a little more; the last one has fewer, or none.

        Keys lead to candidates; token ids and parents are then compared, so that a collision of keys can never hand
        out another prompt's KV.

        Blocks that were given out may go between two slices: compare the generations of their rows at the end.
        """
        before, start = root, 0
        if known is not None and len(known):
            before, start = int(known[-1]), len(known)
        batches: list[Rows] = []
        blocks = 0
        find_all = partial(self.find_all, _namespace_of(root))
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
        """The beginning of `rows` that really is this chain's from block `start` on, which continues row `before`."""
        if not len(rows):
            return rows
        good = (self.tokens[rows] == chain.token_rows(start, start + len(rows))).all(axis=1)
        parents = self.parent[rows]
        good[0] &= parents[0] == before
        good[1:] &= parents[1:] == rows[:-1]
        return rows if good.all() else rows[: int(good.argmin())]

    def usable(self, path: Rows, available: GroupMask | None = None) -> Rows:
        """The longest beginning of `path`, the rows of a prompt from its first block on, that every group allows.

        Args:
            path: rows from the first block on.
            available: [len(path)] groups that count as there; by default those that some tier offers.
        """
        if self.refused:
            path = path[: self.unrefused(path)]
        available = self.available[path] if available is None else available[: len(path)]
        if self.has_rules:
            return path[: longest_prefix(self.groups, available)]
        good = available == self.all_groups
        return path if good.all() else path[: int(good.argmin())]

    def usable_lengths(self, path: Rows) -> Bools:
        """[len(path) + 1]: after which lengths of `path`, the rows of a prompt from its first block on, every group
        lets a prompt continue, by what the tiers offer."""
        usable = possible_lengths(self.groups, self.available[path])
        if self.refused:
            usable[self.unrefused(path) + 1 :] = False
        return usable

    def unrefused(self, rows: Rows, first_block: int = 0) -> int:
        """How many of the rows of a prompt from `first_block` on come before one that is refused."""
        there = (row for row, generation in self.refused.items() if self.generation[row] == generation)
        places = ((row, int(self.depth[row]) - first_block) for row in there)
        return min((at for row, at in places if 0 <= at < len(rows) and rows[at] == row), default=len(rows))

    def needed(self, blocks: int, first_block: int = 0) -> GroupMask:
        """[blocks - first_block]: the groups that a reader of `blocks` blocks needs from `first_block` on."""
        if self.has_rules:
            return needed_groups(self.groups, blocks)[first_block:]
        return np.full(blocks - first_block, self.all_groups, np.uint8)

    def distances(self, path: Rows) -> npt.NDArray[np.int8]:
        """[len(path)]: the tier from which each block of a usable prefix has to be brought, the nearest where it has
        bytes that the prefix needs; 0 for a block of which nothing is needed."""
        if not self.has_rules:
            return self.nearest[path]
        return self._nearest(path, self.needed(len(path)))

    def find(self, namespace: int, key: bytes) -> int | None:
        """The row of the block that has this key in a namespace; its tokens and its parent may be another prompt's."""
        return self._keys.find(self._masks.apply(namespace, key).tobytes())

    def find_all(self, namespaces: int | Ordinals, keys: bytes | npt.NDArray[np.uint8]) -> Rows:
        """`find` for keys one behind the other, in one namespace or each in its own; -1 where there is none."""
        return self._keys.find_all(self._masks.apply(namespaces, keys).view(np.uint8))

    def find_by_digits(self, digits: str, start: int = 0, stop: int | None = None) -> Rows:
        """The rows from `start` to `stop` (all by default) whose keys begin with these hex digits."""
        end = self.rows if stop is None else min(stop, self.rows)
        rows = start + np.flatnonzero(self.namespace[start:end] != NOWHERE)
        keys = self.keys(rows)
        whole = np.frombuffer(bytes.fromhex(digits[: len(digits) // 2 * 2]), np.uint8)
        same = (keys[:, : len(whole)] == whole).all(axis=1)
        if len(digits) % 2:
            same &= keys[:, len(whole)] >> 4 == int(digits[-1], 16)
        chosen: Rows = rows[same]
        return chosen

    def key(self, row: int) -> bytes:
        """Key of the block in `row`."""
        return self._masks.apply(int(self.namespace[row]), self._keys.key(row)).tobytes()

    def keys(self, rows: Rows) -> npt.NDArray[np.uint8]:
        """[len(rows), 16]: keys of the blocks in `rows`."""
        return self._masks.apply(self.namespace[rows], self._keys.keys(rows)).view(np.uint8)

    def subtree(self, roots: Rows) -> list[int]:
        """`roots`, different rows, and everything that continues them, each row once and parents before children.

        It takes 0.1 us a row: see `Descendants` for subtrees of any size.
        """
        walk = Descendants(self, roots)
        found: list[int] = []
        while not walk.done:
            found += walk.take(_WALK_STEPS)
        return found

    # -- adding and removing ------------------------------------------------------------------------------------

    def insert_path(
        self, parent: int, namespace: int, keys: npt.NDArray[np.uint8], tokens: npt.NDArray[np.uint32], now_s: float
    ) -> tuple[Rows, int]:
        """The rows of blocks that continue `parent` one after the other; new ones where there are none.

        Args:
            parent: a row, or the namespace's root for first blocks.
            namespace: its ordinal.
            keys: [m, 16].
            tokens: [m, block_tokens].
            now_s: the time of the new blocks' last use.

        Returns:
            The rows, and how many of them, from the first, were there before. Fewer than m rows when a key is another
            block's of the namespace: from there on the prompt cannot be cached.
        """
        found = self.find_all(namespace, keys)
        there = found[: len(found) if (found >= 0).all() else int((found < 0).argmax())]
        same = self.parent[there] == np.concatenate([[parent], there])[:-1]
        same &= (self.tokens[there] == tokens[: len(there)]).all(axis=1)
        old = len(same) if same.all() else int(same.argmin())
        rest = found[old:]
        fresh = len(rest) if (rest < 0).all() else int((rest >= 0).argmax())  # a key that is found here is another's
        fresh = min(fresh, _first_repeated(keys[old : old + fresh]))
        if not fresh:
            return found[:old], old
        used = self.rows
        rows = self.take_rows(fresh)
        above = int(found[old - 1]) if old else parent
        parents = np.concatenate([[above], rows[:-1]])
        depth = int(self.depth[above]) + 1 if above >= 0 else 0
        end = old + fresh
        self._clear(rows[rows < used])
        self.insert_all(
            rows,
            parents,
            np.full(fresh, namespace),
            np.arange(depth, depth + fresh),
            keys[old:end],
            tokens[old:end],
            now_s,
        )
        return np.concatenate([found[:old], rows]), old

    def _clear(self, rows: Rows) -> None:
        """Makes 0 what `insert_all` expects to be, in rows that were used before: they are as they were left."""
        columns: tuple[npt.NDArray[Any], ...] = (
            *(self.children, self.keep, self.pinned, self.any_part, self.complete, self.available, self.expired),
            *(self.there, self.checksummed, self.holds, self.tier_children, self.entered, self.uses, self.rank),
        )
        for column in columns:
            column[rows] = 0

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
            keys: [m, 16], in each namespace all different.
            tokens: [m, block_tokens].
            now_s: the time of their last use.
        """
        self._keys.insert_all(self._masks.apply(namespaces, keys).view(np.uint8), rows)
        self.tokens[rows] = tokens
        self.parent[rows] = parents
        self.namespace[rows] = namespaces
        self._count_blocks(namespaces, 1)
        self.depth[rows] = depths
        self.last_used[rows] = now_s
        self.nearest[rows] = NONE
        self.slots[rows] = NO_SLOT
        self.checksums[rows] = 0
        inner = parents >= 0
        np.add.at(self.children, parents[inner], 1)
        link(self, rows, parents)

    def removable(self, row: int) -> bool:
        """Whether the block exists and nothing continues, keeps or pins it."""
        if self.children[row] or self.keep[row] or self.pinned[row]:
            return False
        return bool(self.namespace[row] != NOWHERE)

    def all_removable(self, rows: Sequence[int]) -> Rows:
        """Those of different blocks, children before parents, that are removable once those before them are gone."""
        children, keep, pinned = self.children.data, self.keep.data, self.pinned.data
        namespace, parent = self.namespace.data, self.parent.data
        gone: dict[int, int] = {}  # children that go, by parent
        going = []
        for row in rows:
            if children[row] == gone.get(row, 0) and not keep[row] and not pinned[row] and namespace[row] != NOWHERE:
                going.append(row)
                gone[parent[row]] = gone.get(parent[row], 0) + 1
        return np.array(going, np.int64)

    def remove(self, row: int) -> None:
        """Forgets a block that has no copy left and is removable.

        Ancestors that were without copies and stayed only for its sake go with it.
        """
        if self.any_part[row] or not self.removable(row):
            raise RuntimeError(f"row {row} was removed while it has no block, or one with copies, children or keepers")
        self.remove_bare([row])

    def remove_all(self, rows: Rows) -> None:
        """Forgets m different blocks without copies, children before parents: each is removable once those before it
        are gone.

        Ancestors that were without copies and stayed only for their sake go with them.
        """
        if self.any_part[rows].any():
            raise RuntimeError(f"of {len(rows)} rows to be removed, row {rows[self.any_part[rows] != 0][0]} has copies")
        parents = self.parent[rows].astype(np.int64)
        self._forget(rows, parents)
        parents = parents[parents >= 0]
        np.subtract.at(self.children, parents, 1)
        self.remove_bare(np.unique(parents[self.any_part[parents] == 0])[::-1].tolist())

    def remove_bare(self, rows: Iterable[int]) -> int:
        """Forgets those of `rows` that have no copy and are removable, and ancestors that stayed only for their sake.

        Returns how many blocks went; 1 us each.
        """
        any_part, children, keep = self.any_part.data, self.children.data, self.keep.data
        namespace, parent, pinned = self.namespace.data, self.parent.data, self.pinned.data
        gone: dict[int, None] = {}  # in order
        for row in rows:
            while not (any_part[row] or children[row] or keep[row] or pinned[row] or namespace[row] == NOWHERE):
                if row in gone:
                    break
                gone[row] = None
                row = parent[row]
                if row < 0:
                    break
                children[row] -= 1
        if gone:
            forgotten = np.fromiter(gone, np.int64, len(gone))
            self._forget(forgotten, self.parent[forgotten].astype(np.int64))
        return len(gone)

    def _forget(self, rows: Rows, parents: Rows) -> None:
        self._keys.remove_all(rows)
        if self.has_priorities:  # without copies, nothing of them is in `retained_bytes`
            self.prioritize(rows[self.priority[rows] != 0], 0, 0.0)
        self._count_blocks(self.namespace[rows], -1)
        self.namespace[rows] = NOWHERE
        self.generation[rows] += 1
        self.free.extend(rows.tolist())
        stays = self.namespace[np.maximum(parents, 0)] != NOWHERE  # of a parent that goes too nobody reads the list
        unlink_all(self, rows[stays], parents[stays])

    # -- copies -------------------------------------------------------------------------------------------------

    def put_copies(self, rows: Rows, tier: int, slots: npt.NDArray[np.int64], now_s: float) -> Rows:
        """Records where parts of m different blocks are in `tier`: [m, parts] slots, NO_SLOT leaves a part as it is.

        Returns the blocks that had nothing there before.
        """
        place = self.slots[rows, tier]
        place = np.where(slots != NO_SLOT, slots, place)
        self.slots[rows, tier] = place
        new: Rows = rows[(self.any_part[rows] & np.uint8(1 << tier)) == 0]
        if len(new):
            self.any_part[new] |= np.uint8(1 << tier)
            self.entered[new, tier] = now_s
            self._count_children(new, tier, 1)
        self._note(rows, tier, place)
        return new

    def drop_copies(self, rows: Rows, tier: int, groups: int | GroupMask | None = None) -> npt.NDArray[np.int64]:
        """Forgets the bytes of `groups` of m different blocks in `tier`.

        Args:
            rows: [m] blocks.
            tier: where.
            groups: [m] masks, or one for all blocks; all groups by default.

        Returns:
            [m, parts]: the slots that are free now, NO_SLOT for parts that had none or stay.
        """
        place = self.slots[rows, tier]
        freed: npt.NDArray[np.int64] = place
        if groups is not None:
            wanted = np.broadcast_to(np.asarray(groups, np.uint8), (len(rows),))
            freed = np.where((wanted[:, None] & self.part_mask) != 0, place, NO_SLOT)
        gone = freed != NO_SLOT
        place = np.where(gone, NO_SLOT, place)
        self.slots[rows, tier] = place
        if tier == CPU:
            self.checksummed[rows] &= ~gone
        bit = np.uint8(1 << tier)
        left = rows[((self.any_part[rows] & bit) != 0) & (place == NO_SLOT).all(axis=1)]
        if len(left) and (groups is None or tier != DISK):  # on disk the block's record stays: its children need it
            self.any_part[left] &= ~bit
            self._count_children(left, tier, -1)
        self._note(rows, tier, place)
        return freed

    def _count_children(self, rows: Rows, tier: int, change: int) -> None:
        parents = self.parent[rows]
        inner = parents[parents >= 0]
        if len(inner) == 1:
            self.tier_children[inner[0], tier] += change
        elif len(inner):
            np.add.at(self.tier_children[:, tier], inner, change)

    def _note(self, rows: Rows, tier: int, place: npt.NDArray[np.int64]) -> None:
        """Brings up to date what follows from the slots of `rows` in `tier`, [m, parts]."""
        has = place != NO_SLOT
        there = np.zeros(len(rows), np.uint8)
        for group in self.groups:
            there |= np.uint8(group.mask) * has[:, list(group.parts)].all(axis=1)
        changed = rows[there != self.there[rows, tier]]
        self.there[rows, tier] = there
        bit = np.uint8(1 << tier)
        self.complete[rows] = np.where(there == self.all_groups, self.complete[rows] | bit, self.complete[rows] & ~bit)
        self._offer(rows)
        if self.has_priorities:
            self._count_retained(rows)
        if self.observer is not None and len(changed):
            self.observer(self, changed)

    def _offer(self, rows: Rows) -> None:
        """Brings `available` and `nearest` of `rows` up to date."""
        available = np.zeros(len(rows), np.uint8)
        for tier in range(TIERS):
            if self.offered & (1 << tier):
                available |= self.there[rows, tier]
        self.available[rows] = available
        if len(self.groups) == 1:
            self.nearest[rows] = _NEAREST[self.complete[rows] & np.uint8(self.offered)]
        else:
            self.nearest[rows] = np.where(available == 0, NONE, self._nearest(rows, available))

    def _nearest(self, rows: Rows, wanted: GroupMask) -> npt.NDArray[np.int8]:
        """The nearest tier that has, together with those above it, all `wanted` groups; 0 where none is wanted."""
        nearest = np.zeros(len(rows), np.int8)
        lacking = wanted.copy()
        for tier in range(TIERS):
            if self.offered & (1 << tier):
                nearest[(lacking & self.there[rows, tier]) != 0] = tier
                lacking &= ~self.there[rows, tier]
        nearest[lacking != 0] = NONE
        return nearest

    def offer(self, tier: int, offered: bool) -> None:
        """Whether copies in `tier` count as there: blocks that have no other copy are matched no more if not."""
        self.offered = self.offered | 1 << tier if offered else self.offered & ~(1 << tier)
        self._offer(np.arange(self.rows))
        if self.observer is not None:
            self.observer(self, self.copies(tier))

    def set_checksums(self, rows: Rows, checksums: npt.NDArray[np.uint64]) -> None:
        """Records the checksums, [m, parts], of the copies on disk of m blocks.

        CPU copies that have others do not count as checksummed any more.
        """
        self.checksummed[rows] &= self.checksums[rows] == checksums
        self.checksums[rows] = checksums

    def set_part_checksums(self, rows: Rows, parts: Rows, checksums: npt.NDArray[np.uint64]) -> None:
        """Records the checksums of m parts in the CPU tier, except where a copy on disk has another."""
        alone = self.slots[rows, DISK, parts] == NO_SLOT
        self.checksums[rows[alone], parts[alone]] = checksums[alone]
        self.checksummed[rows, parts] = self.checksums[rows, parts] == checksums

    def available_here(self, rows: Rows) -> GroupMask:
        """[len(rows)]: the groups that some tier of this host offers."""
        here = np.zeros(len(rows), np.uint8)
        for tier in range(TIERS):
            if self.offered & LOCAL_TIERS & (1 << tier):
                here |= self.there[rows, tier]
        return here

    def has(self, row: int, tier: int) -> bool:
        """Whether `tier` has every part of the block."""
        return bool(self.complete[row] & (1 << tier))

    def lacking(self, rows: Rows, tier: int, wanted: GroupMask | None = None) -> GroupMask:
        """[len(rows)]: which of the `wanted` groups (all by default) `tier` lacks of each block."""
        lacking: GroupMask = ~self.there[rows, tier] & (np.uint8(self.all_groups) if wanted is None else wanted)
        return lacking

    def missing(self, rows: Rows, tier: int, wanted: GroupMask | None = None) -> Rows:
        """The rows of which `tier` lacks a `wanted` group; any group by default."""
        chosen: Rows = rows[self.lacking(rows, tier, wanted) != 0]
        return chosen

    # -- protection ---------------------------------------------------------------------------------------------

    def hold(self, rows: Rows, tier: int, wanted: GroupMask | None = None) -> None:
        """Protects bytes in `tier`, present or on their way. Rows are distinct.

        Args:
            rows: [m] blocks.
            tier: where.
            wanted: [m] groups of each that are held; all by default.
        """
        self._change_holds(rows, tier, wanted, 1)

    def unhold(self, rows: Rows, tier: int, wanted: GroupMask | None = None) -> None:
        """Ends one hold of each row."""
        self._change_holds(rows, tier, wanted, -1)

    def _change_holds(self, rows: Rows, tier: int, wanted: GroupMask | None, change: int) -> None:
        if wanted is None:
            self.holds[rows, tier] += change
        else:
            self._change_group_holds(rows, tier, wanted, change)
        self.keep[rows] += change

    def release(self, rows: Rows, tier: int, groups: GroupMask) -> None:
        """Ends one hold on `groups` [m] of each row; who held them keeps the blocks."""
        self._change_group_holds(rows, tier, groups, -1)

    def _change_group_holds(self, rows: Rows, tier: int, groups: GroupMask, change: int) -> None:
        for group in self.groups:
            self.holds[rows[(groups & np.uint8(group.mask)) != 0], tier, group.bit] += change

    def retain(self, rows: Rows) -> None:
        """Keeps the blocks in existence, wherever they are."""
        self.keep[rows] += 1

    def unretain(self, rows: Rows) -> None:
        """Ends one retention of each row."""
        self.keep[rows] -= 1

    def touch(self, rows: Rows, now_s: float) -> None:
        """Marks blocks as used. Touching whole prefixes keeps a parent at least as recent as its children."""
        self.last_used[rows] = now_s

    # -- expiry: bytes that only shorter prefixes need ------------------------------------------------------------

    def expire(self, path: Rows, groups: int | None = None, ends: Sequence[int] = ()) -> None:
        """Of a prompt whose blocks are `path` some groups have been stored (a mask; all by default): what only shorter
        prefixes need of them may go first, but for prefixes of `ends` blocks: a prompt that ends inside `path`, which
        its answer continues, is likely to be asked again. Blocks that are pinned keep what was wanted of them.

        Prompts that share a beginning continue differently where they branch, so the end of the shared part is a prefix
        that is likely to be asked for again: what it needs is wanted, and wanted again if it had expired.

        Blocks of `path` that are of another namespace than its last one stay as they are: who stored this prompt has
        not stored them.
        """
        if self.has_rules and len(path):
            stays = self.pinned[path] | (self.namespace[path] != self.namespace[path[-1]])
            stored = np.where(stays, np.uint8(0), np.uint8(self.all_groups if groups is None else groups))
            expired = expired_groups(self.groups, len(path), self.branches(path, ends))
            self.expired[path] = (self.expired[path] & ~stored) | (expired & stored)

    def branches(self, path: Rows, ends: Sequence[int] = ()) -> npt.NDArray[np.int64]:
        """The lengths of prefixes of `path` that are likely to be asked for: where it branches, and those of `ends`."""
        branches = 1 + np.flatnonzero(self.children[path[:-1]] > 1)
        return np.concatenate([branches, [end for end in ends if 0 < end < len(path)]]).astype(np.int64)

    def revive(self, path: Rows) -> None:
        """A prompt continues after `path`: the bytes that it needs are wanted again."""
        if self.has_rules and len(path):
            self.expired[path] &= ~self.needed(len(path))

    # -- priorities: which blocks go first, and last -------------------------------------------------------------

    @property
    def has_priorities(self) -> bool:
        """Whether any block may have a priority other than 0; what `priorities` says is all 0 if not."""
        return self.prioritized > 0

    def prioritize(
        self, rows: Rows, priority: int | npt.NDArray[np.int8], until_s: float | npt.NDArray[np.float64]
    ) -> None:
        """Gives m different blocks a priority, from -100 to 100, until a time; 0 takes away what they have.

        Args:
            rows: [m] blocks.
            priority: [m], or one for all blocks.
            until_s: [m], or one for all blocks; infinity for ever.
        """
        before = int(np.count_nonzero(self.priority[rows]))
        self.priority[rows] = priority
        self.priority_until[rows] = until_s
        self.prioritized += int(np.count_nonzero(self.priority[rows])) - before
        self._count_retained(rows)

    def _count_retained(self, rows: Rows) -> None:
        """Brings `retained_bytes` up to date with the priorities and the slots of different rows."""
        rows = rows[(self.priority[rows] > 0) | (self.retained_groups[rows] != 0)]
        groups = np.where(self.priority[rows] > 0, self.groups_there(rows), np.uint8(0))
        change = self.group_bytes[groups] - self.group_bytes[self.retained_groups[rows]]
        self.retained_groups[rows] = groups
        namespaces = self.namespace[rows]
        for namespace in np.unique(namespaces[change != 0]).tolist():
            more = int(change[namespaces == namespace].sum())
            self.on_retained(namespace, more)
            self.retained_bytes[namespace] += more
            if not self.retained_bytes[namespace]:
                del self.retained_bytes[namespace]

    def groups_there(self, rows: Rows) -> GroupMask:
        """[len(rows)]: the KV groups of which some tier has bytes, be it one part of several."""
        has = (self.slots[rows] != NO_SLOT).any(axis=1)
        groups = np.zeros(len(rows), np.uint8)
        for group in self.groups:
            groups |= np.uint8(group.mask) * has[:, list(group.parts)].any(axis=1)
        return groups

    def priorities(self, rows: Rows | slice, now_s: float) -> npt.NDArray[np.int8]:
        """[len(rows)]: the priority of each block at that time; 0 where it has none, or had one until then."""
        priorities: npt.NDArray[np.int8] = np.where(self.priority_until[rows] > now_s, self.priority[rows], np.int8(0))
        return priorities

    # -- eviction -----------------------------------------------------------------------------------------------

    def evictable(self, tier: int, *, demotable: bool, among: Rows | slice | None = None) -> Rows:
        """Rows whose copy in `tier` may go now: not held, and no child has a copy there (leaves first).

        A copy that is the block's last may only go when the block itself may, or when some of it can be written a tier
        down.

        Args:
            tier: where.
            demotable: whether it can be written a tier down.
            among: different rows, or some from one row on; all by default.
        """
        rows = slice(0, self.rows) if among is None else among
        leaves = (self.any_part[rows] & np.uint8(1 << tier)) != 0
        leaves &= self.tier_children[rows, tier] == 0
        chosen: Rows = rows.start + np.flatnonzero(leaves) if isinstance(rows, slice) else rows[leaves]
        chosen = chosen[~self.held(chosen, tier)]  # few are left of a large table
        may_leave = ~self.last_copies(chosen, tier)  # the block has another copy,
        may_leave |= (self.children[chosen] == 0) & (self.keep[chosen] == 0) & ~self.pinned[chosen]  # or may vanish,
        if demotable:
            may_leave |= self.wanted(chosen, tier) != 0  # or may go down
        return chosen[may_leave]

    def wanted(self, rows: Rows | slice, tier: int) -> GroupMask:
        """[len(rows)]: the groups of each block that `tier` has and that not only shorter prefixes need."""
        wanted: GroupMask = self.there[rows, tier] & ~self.expired[rows]
        return wanted

    def last_copies(self, rows: Rows | slice, tier: int) -> npt.NDArray[np.bool_]:
        """[len(rows)]: of which rows no other tier has anything, or none has one of the `wanted` groups.

        A record on disk without bytes is no copy: a block has one when others continue it there. Of a block that is
        pinned, no copies are what a store has that others may delete from, and what memory has in place of the disk,
        since the block is to be there after a restart.
        """
        others = (self.any_part[rows] & np.uint8(_ALL_TIERS & ~(1 << tier))) != 0
        if (pinned := self.pinned[rows]).any():
            others &= ~pinned | ((self.any_part[rows] & np.uint8(lasting_copies(tier))) != 0)
        lacking = self.wanted(rows, tier)
        for other in range(TIERS):
            if other == tier:
                continue
            if not lasting_copies(tier) & (1 << other):
                lacking &= ~self.there[rows, other] | np.where(pinned, np.uint8(self.all_groups), np.uint8(0))
            else:
                lacking &= ~self.there[rows, other]
        return np.asarray(~others | (lacking != 0))

    def held(self, rows: Rows | slice, tier: int) -> npt.NDArray[np.bool_]:
        """[len(rows)]: of which rows any group is held in `tier`."""
        holds = self.holds[rows, tier]
        if len(self.groups) == 1:
            return np.asarray(holds[..., 0] > 0)
        return np.asarray((holds > 0).any(axis=-1))

    def copies(self, tier: int, without: int | None = None) -> Rows:
        """Rows with every part in `tier` (and no part in `without`)."""
        n = self.rows
        rows = (self.complete[:n] & np.uint8(1 << tier)) != 0
        if without is not None:
            rows &= (self.any_part[:n] & np.uint8(1 << without)) == 0
        return np.flatnonzero(rows)


def lasting_copies(tier: int) -> int:
    """The tiers, a bit each, whose copies of a pinned block count beside the one in `tier`: this host's own, and none
    beside the disk's, without which the block would not outlast a restart."""
    return 0 if tier == DISK else LOCAL_TIERS & ~(1 << tier)


def _namespace_of(root: int) -> int:
    """The namespace whose first blocks have this root for a parent."""
    return -1 - root


def _first_repeated(keys: npt.NDArray[np.uint8]) -> int:
    """How many keys, from the first on, are all different."""
    halves = np.ascontiguousarray(keys).view(np.uint64)
    order = np.lexsort((halves[:, 0], halves[:, 1]))
    same = (halves[order[1:]] == halves[order[:-1]]).all(axis=1)
    again = order[1:][same]  # `order` is stable: of equal keys the later one
    return int(again.min()) if len(again) else len(keys)
