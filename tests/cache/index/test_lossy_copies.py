"""What is known of lossy copies stays with their bytes, on every way to memory."""

from __future__ import annotations

import numpy as np
import pytest

from prefixd.cache.index.coded_columns import LossyCopies
from prefixd.cache.index.trie import CPU, GPU, REMOTE, Trie
from tests.cache.index.entering import enter_block

KEY, TOKENS = b"k" * 16, b"\1\0\0\0" * 2
ERRORS = np.array([[0.5, 0.25]], np.float32)


@pytest.mark.parametrize("arrives", [True, False])
def test_marks_survive_that_the_rest_of_a_block_leaves_memory(arrives: bool) -> None:
    """A part is read and copied on while another part of the block leaves memory, and the marks with it."""
    trie = Trie(2, (8, 8))
    row = enter_block(trie, KEY, TOKENS)
    assert row is not None
    rows, lossy = np.array([row]), LossyCopies.none(1)
    trie.put_copies(rows, CPU, np.array([[-1, 7]]), 0.0)
    trie.set_errors(rows, ERRORS)
    trie.set_decoded(rows, np.array([1], np.uint8))
    lossy.note(trie, rows, np.array([0]))
    trie.drop_copies(rows, CPU)
    assert not trie.decoded[row] and not trie.errors[row].any()
    lossy.restore(trie, rows, np.array([arrives]))
    assert bool(trie.decoded[row]) is arrives and (trie.errors[row] == (ERRORS[0] if arrives else 0)).all()


def test_a_store_lacks_no_bytes_of_a_lossy_copy() -> None:
    trie = Trie(2, (8,))
    rows = np.array([enter_block(trie, KEY, TOKENS)])
    for tier in (GPU, CPU):
        trie.put_copies(rows, tier, np.array([[3]]), 0.0)
    assert trie.unwritten(rows, CPU, REMOTE).all()
    trie.set_decoded(rows, np.array([1], np.uint8))
    for tier in (GPU, CPU):
        assert not trie.unwritten(rows, tier, REMOTE).any() and trie.unwritten(rows, tier, 2).all()
    trie.drop_copies(rows, GPU)
    assert not trie.unwritten(rows, CPU, REMOTE).any()
    trie.drop_copies(rows, CPU)
    trie.put_copies(rows, CPU, np.array([[3]]), 0.0)
    assert trie.unwritten(rows, CPU, REMOTE).all(), "computed again"
