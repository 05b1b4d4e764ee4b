"""A prompt's path that is remembered: it is what a search from the root finds, and costs only what has changed."""

from __future__ import annotations

import random
from collections.abc import Sized

import numpy as np
import pytest

from prefixd.cache import Trie
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.known_path import KnownPath
from tests.cache.index.entering import enter_chain

ROOT = -1
BLOCKS = 8192


def chain_of(blocks: int) -> BlockChain:
    return BlockChain(np.arange(blocks, dtype=np.uint32).tobytes(), 1, 0)


def test_a_second_look_asks_for_one_key_and_a_longer_path_for_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    trie, chain, known = Trie(1, (1,)), chain_of(2 * BLOCKS), KnownPath()
    enter_chain(trie, chain_of(BLOCKS))
    find_all, asked = trie._keys.find_all, 0

    def counting(keys: Sized) -> object:
        nonlocal asked
        asked += len(keys)
        return find_all(keys)

    monkeypatch.setattr(trie._keys, "find_all", counting)
    assert len(known.find(trie, ROOT, chain, 2 * BLOCKS)) == BLOCKS
    asked = 0
    for _ in range(10):
        assert len(known.find(trie, ROOT, chain, 2 * BLOCKS)) == BLOCKS
    assert asked == 10
    assert len(known.find(trie, ROOT, chain, BLOCKS)) == BLOCKS
    assert asked == 10, "no key behind the limit"
    monkeypatch.undo()
    enter_chain(trie, chain_of(BLOCKS + 3))
    monkeypatch.setattr(trie._keys, "find_all", counting)
    assert len(known.find(trie, ROOT, chain, 2 * BLOCKS)) == BLOCKS + 3
    assert asked <= 10 + 1 + 16


def test_it_is_what_a_search_from_the_root_finds_whatever_went_and_came() -> None:
    trie, chain, known, chance = Trie(1, (1,)), chain_of(60), KnownPath(), random.Random(3)
    lengths = set()
    for _ in range(300):
        path = trie.nodes(ROOT, chain)
        if chance.random() < 0.5 and len(path):
            kept = chance.randrange(len(path))
            if kept:
                trie.retain(path[kept - 1 : kept])
            trie.remove_all(path[kept:][::-1])
            if kept:
                trie.unretain(path[kept - 1 : kept])
            if chance.random() < 0.5:  # other blocks take their rows
                other = BlockChain(np.full(20, 99, np.uint32).tobytes(), 1, 0)
                enter_chain(trie, other)
        else:
            enter_chain(trie, chain_of(chance.randrange(1, 61)))
        if chance.random() < 0.7:
            limit = chance.choice([60, 60, 30])
            found = known.find(trie, ROOT, chain, limit)
            assert found.tolist() == trie.nodes(ROOT, chain, limit).tolist()
            lengths.add(len(found))
    assert len(lengths) > 20
