"""Going through what continues a block: each block once, parents first, in time that depends on the subtree alone."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from prefixd.cache import Trie
from prefixd.cache.index.children import Descendants, MovedError
from prefixd.cache.index.trie import Rows
from tests.cache.index.entering import enter_block
from tests.tries import is_removable, remove_row, subtree_rows, used_rows

TOKENS = 2


def random_trie(dice: random.Random, blocks: int) -> Trie:
    """A trie of random shape; rows in order of their insertion, one by one or many at once."""
    trie = Trie(TOKENS, (8,))
    while len(trie) < blocks:
        if dice.random() < 0.5:
            parent = dice.randrange(-1, len(trie))
            key, tokens = dice.randbytes(16), dice.randbytes(4 * TOKENS)
            enter_block(trie, key, tokens, parent)
        else:
            count = dice.randrange(1, 12)
            rows = trie.take_rows(count)
            parents = np.array([dice.randrange(-1, int(row)) for row in rows], np.int64)
            depths = np.zeros(count, np.int64)
            for at, parent in enumerate(parents.tolist()):
                above = depths[parent - rows[0]] if parent >= rows[0] else trie.depth[parent]
                depths[at] = 0 if parent < 0 else above + 1
            keys = np.frombuffer(dice.randbytes(16 * count), np.uint8).reshape(count, 16)
            trie.insert_all(
                rows, parents, np.zeros(count, np.int64), depths, keys, np.zeros((count, TOKENS), np.uint32), 0.0
            )
    return trie


def below(trie: Trie, roots: list[int]) -> set[int]:
    """What a walk has to find, from the parents alone."""
    found = set(roots)
    while more := {row for row in used_rows(trie).tolist() if int(trie.parent[row]) in found} - found:
        found |= more
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_walk_meets_each_block_once_and_parents_first(seed: int) -> None:
    dice = random.Random(seed)
    trie = random_trie(dice, 120)
    for _ in range(40):  # leaves go, so that lists lose their first, last and middle siblings
        leaves = [row for row in used_rows(trie).tolist() if is_removable(trie, row)]
        remove_row(trie, dice.choice(leaves))
    roots = dice.sample(used_rows(trie).tolist(), dice.randrange(1, 10))
    walk = Descendants(trie, np.array(roots))
    met: list[int] = []
    while not walk.done:
        met += walk.take(dice.randrange(1, 5))
    assert len(met) == len(set(met)) and set(met) == below(trie, roots)
    at = {row: place for place, row in enumerate(met)}
    assert all(place > at.get(int(trie.parent[row]), -1) for row, place in at.items())
    assert walk.take(10) == []


@pytest.mark.parametrize("seed", range(20))
def test_many_blocks_are_removed_as_one_by_one(seed: int) -> None:
    dice = random.Random(seed)
    trie, other = (random_trie(random.Random(seed), 100) for _ in range(2))
    kept = np.array(dice.sample(used_rows(trie).tolist(), 3))
    for each in (trie, other):
        each.retain(kept)
        each.put_copies(used_rows(each)[::2], 1, used_rows(each)[::2, None] * 64, 0.0)  # others stay for them alone
    children_first = subtree_rows(trie, used_rows(trie))[::-1]
    going = trie.all_removable(children_first)
    assert going.tolist() == [row for row in children_first if not below(trie, [row]) & set(kept.tolist())]
    trie.drop_copies(going, 1)
    trie.remove_all(going)
    for row in children_first:
        if is_removable(other, row):  # else it went with the last of its children
            other.drop_copies(np.array([row]), 1)
            remove_row(other, row)
    assert used_rows(trie).tolist() == used_rows(other).tolist()
    rows = used_rows(trie)
    assert (trie.children[rows] == other.children[rows]).all()
    assert sorted(subtree_rows(trie, rows)) == rows.tolist()


def test_blocks_with_copies_are_not_removed() -> None:
    trie = random_trie(random.Random(0), 10)
    trie.put_copies(np.array([3]), 1, np.array([[64]]), 0.0)
    with pytest.raises(RuntimeError, match="row 3 has copies"):
        trie.remove_all(np.array([3]))


def test_a_walk_says_when_its_place_is_gone() -> None:
    trie = Trie(TOKENS, (8,))
    rows = chain(trie, 6)
    trie.retain(rows[:5])  # blocks without copies go with what continues them
    walk = Descendants(trie, rows[:1])
    assert walk.take(4) == [0, 1, 2, 3]
    remove_row(trie, 5)
    assert walk.take(1) == [4]
    trie.unretain(rows[:5])
    remove_row(trie, 4)
    with pytest.raises(MovedError):
        walk.take(1)


def test_a_walk_goes_on_in_a_table_that_has_grown() -> None:
    trie = Trie(TOKENS, (8,))
    chain(trie, 3)
    walk = Descendants(trie, np.array([0]))
    assert walk.take(2) == [0, 1]
    keys = np.random.default_rng(1).integers(0, 256, (3000, 16), np.uint8)
    trie.insert_path(2, 0, keys, np.zeros((3000, TOKENS), np.uint32), 0.0)
    assert walk.take(10_000) == list(range(2, 3003))


def test_a_small_subtree_takes_no_longer_in_a_large_trie() -> None:
    trie = Trie(TOKENS, (8,))
    blocks = 300_000
    chain(trie, blocks)
    begin = time.thread_time()
    for row in range(blocks - 50, blocks):
        assert len(subtree_rows(trie, np.array([row]))) == blocks - row
    assert time.thread_time() - begin < 0.25  # a pass over all rows each time takes a second


def chain(trie: Trie, blocks: int) -> Rows:
    """One prompt of so many blocks."""
    rows = trie.take_rows(blocks)
    keys = np.random.default_rng(0).integers(0, 256, (blocks, 16), np.uint8)
    zeros = np.zeros(blocks, np.int64)
    trie.insert_all(rows, rows - 1, zeros, rows - rows[0], keys, np.zeros((blocks, TOKENS), np.uint32), 0.0)
    return rows
