"""The structure of a trie: finds blocks by key, enters them behind their parents, and removes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from prefixd.cache.index.children import link, unlink_all
from prefixd.cache.index.eviction import EvictionColumns
from prefixd.cache.index.keys.key_index import Ordinals, Rows
from prefixd.cache.index.trie_table import NO_SLOT, NONE, NOWHERE, add_each


class Structure(EvictionColumns):
    """Blocks and their parents. Arguments as for `BlockTable`."""

    # -- by key ---------------------------------------------------------------------------------------------------

    def find(self, namespace: int, key: bytes) -> int | None:
        """The row with this key in a namespace. The caller compares tokens and parent: keys can collide."""
        return self._keys.find(self._masks.apply(namespace, key).tobytes())

    def find_all(self, namespaces: int | Ordinals, keys: bytes | npt.NDArray[np.uint8]) -> Rows:
        """`find` for keys one behind the other, in one namespace or each in its own; -1 for keys without a row."""
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

    # -- adding and removing ------------------------------------------------------------------------------------

    def insert_path(
        self, parent: int, namespace: int, keys: npt.NDArray[np.uint8], tokens: npt.NDArray[np.uint32], now_s: float
    ) -> tuple[Rows, int]:
        """The rows of consecutive blocks behind `parent`; adds those that are missing.

        Args:
            parent: a row, or the namespace's root for first blocks.
            namespace: its ordinal.
            keys: [m, 16].
            tokens: [m, block_tokens].
            now_s: the time of the new blocks' last use.

        Returns:
            The rows, and how many of them, from the first, were there before. Fewer than m rows if another block of the
            namespace has a key: from there on the prompt cannot be cached.
        """
        found = self.find_all(namespace, keys)
        there = found[: len(found) if (found >= 0).all() else int((found < 0).argmax())]
        same = self.parent[there] == np.concatenate([[parent], there])[:-1]
        same &= (self.tokens[there] == tokens[: len(there)]).all(axis=1)
        old = len(same) if same.all() else int(same.argmin())
        rest = found[old:]
        fresh = len(rest) if (rest < 0).all() else int((rest >= 0).argmax())  # keys found here collide
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
        """Sets the columns to 0 that `insert_all` expects to be 0, in rows that had another block before."""
        columns: tuple[npt.NDArray[Any], ...] = (
            *(
                self.next_sibling,
                self.previous_sibling,
                self.children,
                self.keep,
                self.pinned,
                self.any_part,
                self.available,
                self.expired,
            ),
            *(
                self.there,
                self.checksummed,
                self.holds,
                self.tier_children,
                self.entered,
                self.uses,
                self.hits,
                self.rank,
            ),
        )
        coded = (self.coded_bytes, self.decoded, self.errors) if self.has_coded else ()
        for column in (*columns, *coded):
            column[rows] = 0

    def take_many_rows(self, count: int, tier: int) -> Rows:
        """As `take_rows`, for blocks that `insert_all` and then `put_copies` enter, with copies in `tier`.

        Their columns get huge pages, which take a hundredth of the kernel's time to provide, where every row of such a
        page is about to be written. The table of keys gets its last size at once.
        """
        used = self.rows
        rows = self.take_rows(count)
        self._keys.expect(count)
        self._write_ahead(used, tier)
        return rows

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
        """Enters m new blocks into rows just taken. Each parent is in the trie already, or before its child in `rows`.

        Does not write columns that are 0 in new rows, so that their memory stays untouched.

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
        add_each(self.children, parents[inner], 1)
        link(self, rows, parents)

    def all_removable(self, rows: Sequence[int]) -> Rows:
        """The rows, of different blocks, children before parents, that are removable after those before them.

        A block is removable if it exists and is not kept or pinned, and all its children are removed.
        """
        children, keep, pinned = self.children.data, self.keep.data, self.pinned.data
        namespace, parent = self.namespace.data, self.parent.data
        gone: dict[int, int] = {}  # children that go, by parent
        going = []
        for row in rows:
            if children[row] == gone.get(row, 0) and not keep[row] and not pinned[row] and namespace[row] != NOWHERE:
                going.append(row)
                gone[parent[row]] = gone.get(parent[row], 0) + 1
        return np.array(going, np.int64)

    def remove_all(self, rows: Rows) -> None:
        """Removes m different blocks without copies, children before parents; each is removable after those before it.

        Also removes ancestors without copies that nothing else needs.
        """
        if self.any_part[rows].any():
            raise RuntimeError(f"of {len(rows)} rows to be removed, row {rows[self.any_part[rows] != 0][0]} has copies")
        parents = self.parent[rows].astype(np.int64)
        self._forget(rows, parents)
        parents = parents[parents >= 0]
        np.subtract.at(self.children, parents, 1)
        self.remove_bare(np.unique(parents[self.any_part[parents] == 0])[::-1].tolist())

    def remove_bare(self, rows: Iterable[int]) -> int:
        """Removes the `rows` that are removable and have no copy, and then ancestors without copies.

        Returns the number of removed blocks; takes 1 us each.
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
        if self.has_priorities:  # blocks without copies have no `retained_bytes`
            self.prioritize(rows[self.priority[rows] != 0], 0, 0.0)
        self._count_blocks(self.namespace[rows], -1)
        self.namespace[rows] = NOWHERE
        self.generation[rows] += 1
        self.free.extend(rows.tolist())
        stays = self.namespace[np.maximum(parents, 0)] != NOWHERE  # the lists of removed parents are not read any more
        unlink_all(self, rows[stays], parents[stays])


def _first_repeated(keys: npt.NDArray[np.uint8]) -> int:
    """The number of keys before the first one that repeats an earlier one."""
    halves = np.ascontiguousarray(keys).view(np.uint64)
    order = np.lexsort((halves[:, 0], halves[:, 1]))
    same = (halves[order[1:]] == halves[order[:-1]]).all(axis=1)
    again = order[1:][same]  # `order` is stable, so this is the later of equal keys
    return int(again.min()) if len(again) else len(keys)
