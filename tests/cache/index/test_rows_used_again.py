"""A new block's row is as good as new, and what was never written is not written for its sake."""

from __future__ import annotations

import numpy as np
import pytest

from prefixd.cache import BlockChain, Trie
from prefixd.cache.index.columns import ColumnMemory
from prefixd.cache.index.trie import CPU, GPU, Rows


def insert(trie: Trie, blocks: int, first_token: int) -> Rows:
    chain = BlockChain(np.arange(first_token, first_token + blocks, dtype="<u4").tobytes(), 1, 7)
    rows, _ = trie.insert_path(-1, 0, chain.key_rows(0, blocks), chain.token_rows[:blocks], 0.0)
    return rows


def test_only_rows_that_were_used_before_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    trie = Trie(1, (1,))
    cleared: list[list[int]] = []
    clear = Trie._clear

    def noting(trie: Trie, rows: Rows) -> None:
        cleared.append(rows.tolist())
        clear(trie, rows)

    monkeypatch.setattr(Trie, "_clear", noting)
    first = insert(trie, 10, 0)
    assert cleared == [[]], "memory that was never written stays untaken"
    trie.put_copies(first, GPU, first[:, None], 5.0)
    trie.expired[first] = trie.checksummed[first] = True
    trie.drop_copies(first, GPU)
    trie.remove_all(first[::-1])
    second = insert(trie, 15, 100)
    assert sorted(cleared[1]) == sorted(first.tolist())
    assert set(first.tolist()) < set(second.tolist())
    for column in (trie.expired, trie.checksummed, trie.entered, trie.there, trie.any_part, trie.keep, trie.holds):
        assert not column[second].any()
    trie.put_copies(second, CPU, second[:, None], 6.0)
    assert trie.evictable(CPU, demotable=False).tolist() == [second[-1]]


def test_the_columns_of_a_table_do_not_enter_huge_pages_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel clears each before it gives it away; 20 at once hold the event loop."""
    advised: list[int] = []
    monkeypatch.setattr(
        "prefixd.cache.index.columns._advise", lambda memory, advice, start, nbytes: advised.append(advice)
    )
    trie = Trie(1, (1,))
    trie.reserve(1 << 21)
    of_the_table = len(advised)
    ColumnMemory(huge_pages=True).grown("keys", np.zeros((1, 2), np.uint64), 1 << 21)
    one = advised[of_the_table:]
    huge_pages = one[-1]
    assert len(set(one)) == 2, "reserved without huge pages, used with them"
    assert advised[:of_the_table].count(huge_pages) == 1, "the column of keys alone"
