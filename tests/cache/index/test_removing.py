from __future__ import annotations

import numpy as np

from prefixd.cache import Trie
from prefixd.cache.index.keys import BlockChain
from prefixd.cache.index.trie import _CASCADE, CPU
from tests.cache.index.entering import enter_chain

LONG = 4 * _CASCADE


def chain_of(blocks: int, first: int = 0) -> BlockChain:
    return BlockChain(np.arange(first, first + blocks, dtype=np.uint32).tobytes(), 1, 0)


def test_ancestors_without_copies_go_with_what_continued_them() -> None:
    trie = Trie(1, (1,))
    rows = enter_chain(trie, chain_of(10))
    trie.put_copies(rows[3:4], CPU, np.zeros((1, 1), np.int64), 0.0)
    trie.remove(int(rows[-1]))
    assert trie.used_rows().tolist() == rows[:4].tolist(), "the fourth has a copy"
    assert not trie.stranded


def test_of_a_long_prompt_without_copies_a_part_goes_at_a_time() -> None:
    trie = Trie(1, (1,))
    rows = enter_chain(trie, chain_of(LONG))
    trie.remove(int(rows[-1]))
    assert len(trie.used_rows()) == LONG - _CASCADE
    trie.remove_stranded()
    assert len(trie.used_rows()) == LONG - 2 * _CASCADE
    for _ in range(3):
        trie.remove_stranded()
    assert not len(trie.used_rows()) and not trie.stranded


def test_many_short_prompts_without_copies_share_one_limit() -> None:
    trie = Trie(1, (1,))
    starts = [enter_chain(trie, chain_of(8, 8 * prompt)) for prompt in range(LONG // 8)]
    trie.remove_all(np.array([rows[-1] for rows in starts]))
    assert len(trie.used_rows()) >= LONG - len(starts) - _CASCADE
    while trie.stranded:
        trie.remove_stranded()
    assert not len(trie.used_rows())


def test_what_is_wanted_again_stays() -> None:
    trie = Trie(1, (1,))
    rows = enter_chain(trie, chain_of(LONG))
    trie.remove(int(rows[-1]))
    again = enter_chain(trie, chain_of(LONG))  # the same prompt: what is left of it, and new blocks behind that
    trie.put_copies(again[-1:], CPU, np.zeros((1, 1), np.int64), 0.0)
    trie.remove_stranded()
    assert len(trie.used_rows()) == LONG and not trie.stranded
