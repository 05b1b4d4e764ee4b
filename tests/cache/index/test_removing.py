from __future__ import annotations

import numpy as np

from prefixd.cache import Trie
from prefixd.cache.index.children import Descendants
from prefixd.cache.index.keys.block_keys import BlockChain
from prefixd.cache.index.trie import CPU
from tests.cache.index.entering import enter_chain
from tests.tries import is_removable, remove_row, used_rows

ROOT_OF_MANY = -2000  # of a namespace that was registered after many others, in a trie that is small


def chain_of(blocks: int, first: int = 0) -> BlockChain:
    return BlockChain(np.arange(first, first + blocks, dtype=np.uint32).tobytes(), 1, 0)


def test_ancestors_without_copies_go_with_what_continued_them() -> None:
    trie = Trie(1, (1,))
    rows = enter_chain(trie, chain_of(10))
    trie.put_copies(rows[3:4], CPU, np.zeros((1, 1), np.int64), 0.0)
    remove_row(trie, int(rows[-1]))
    assert used_rows(trie).tolist() == rows[:4].tolist(), "the fourth has a copy"
    assert trie.children[rows[3]] == 0 and is_removable(trie, int(rows[3]))


def test_prompts_that_share_a_beginning_without_copies_go_with_the_last_of_them() -> None:
    trie = Trie(1, (1,))
    shared = enter_chain(trie, chain_of(5))
    ends = [enter_chain(trie, chain_of(3, 100 * end), int(shared[-1])) for end in (1, 2, 3)]
    trie.remove_all(np.array([ends[0][-1], ends[2][-1]]))
    assert sorted(used_rows(trie).tolist()) == sorted([*shared.tolist(), *ends[1].tolist()])
    walk = Descendants(trie, shared[-1:])
    assert sorted(walk.take(100)) == sorted([int(shared[-1]), *ends[1].tolist()]), "siblings are linked as before"
    trie.remove_all(ends[1][-1:])
    assert not len(used_rows(trie))


def test_what_is_kept_or_continued_stays() -> None:
    trie = Trie(1, (1,))
    rows = enter_chain(trie, chain_of(6), ROOT_OF_MANY)
    trie.pinned[rows[1]] = True
    assert trie.remove_bare(rows.tolist()) == 4
    assert used_rows(trie).tolist() == rows[:2].tolist()
    assert trie.remove_bare(rows.tolist()) == 0
    trie.pinned[rows[1]] = False
    assert trie.remove_bare(rows.tolist()) == 2
    assert enter_chain(trie, chain_of(6), ROOT_OF_MANY).tolist() != [], "rows are used again"
