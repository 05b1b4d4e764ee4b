"""Block keys name a whole prefix, and are computed no further than somebody asked."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from prefixd.cache.index.keys.block_keys import BlockChain, xxh3_digest
from prefixd.cache.index.keys.key_index import Rows

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40).map(
    lambda ids: b"".join(i.to_bytes(4, "little") for i in ids)
)


def walk(chain: BlockChain, find_all: Callable[[bytes], Rows], limit: int) -> Rows:
    return np.concatenate([np.empty(0, np.int64), *chain.walk_batches(find_all, limit)])


@given(tokens, st.integers(1, 5), st.integers(0, 2**64 - 1))
def test_a_key_is_the_hash_of_the_parents_key_and_the_blocks_tokens(ids: bytes, width: int, seed: int) -> None:
    chain = BlockChain(ids, width, seed)
    assert len(chain) == len(ids) // 4 // width
    parent = b""
    for index in range(len(chain)):
        block = ids[4 * width * index : 4 * width * (index + 1)]
        assert chain.block(index) == block
        parent = xxhash.xxh3_128_digest(parent + block, seed)
        assert chain.key(index) == parent


@given(tokens, tokens, st.integers(1, 3))
def test_equal_keys_mean_equal_prefixes(first: bytes, second: bytes, width: int) -> None:
    one, other = BlockChain(first, width, 7), BlockChain(second, width, 7)
    for index in range(min(len(one), len(other))):
        assert (one.key(index) == other.key(index)) == (one.blocks(index + 1) == other.blocks(index + 1))


@given(tokens, tokens, st.integers(1, 4))
def test_tokens_may_come_later(begin: bytes, more: bytes, width: int) -> None:
    grown, whole = BlockChain(begin, width, 0), BlockChain(begin + more, width, 0)
    for index in range(len(grown)):
        grown.key(index)
    grown.append(more)
    assert (len(grown), grown.tokens, grown.token_ids) == (len(whole), whole.tokens, begin + more)
    assert [grown.key(i) for i in range(len(grown))] == [whole.key(i) for i in range(len(whole))]


def test_another_seed_gives_other_keys() -> None:
    ids = bytes(range(64))
    assert BlockChain(ids, 4, 1).key(3) != BlockChain(ids, 4, 2).key(3)
    assert len(BlockChain(ids, 4, 1).key(0)) == 16


def test_a_miss_does_not_hash_the_rest_of_the_prompt() -> None:
    hashed: list[bytes] = []

    def digest(data: bytes, seed: int) -> bytes:
        hashed.append(data)
        return xxh3_digest(data, seed)

    chain = BlockChain(bytes(4 * 100), 1, 0, digest)
    assert not len(walk(chain, lambda keys: np.full(len(keys) // 16, -1), 100))
    assert len(hashed) == 1
    chain.key(4)
    chain.key(2)
    assert len(hashed) == 5


@given(st.binary(min_size=4, max_size=4), st.integers(0, 400), st.integers(0, 400), st.integers(0, 400))
def test_a_walk_ends_at_the_limit_or_the_first_unknown_key(seed: bytes, blocks: int, known: int, limit: int) -> None:
    ids = seed * blocks
    reference = BlockChain(ids, 1, 5)
    index = {reference.key(i): 10 + i for i in range(min(known, len(reference)))}

    def find_all(keys: bytes) -> Rows:
        return np.array([index.get(keys[at : at + 16], -1) for at in range(0, len(keys), 16)])

    chain = BlockChain(ids, 1, 5)
    expected = [10 + i for i in range(min(known, limit, len(chain)))]
    assert walk(chain, find_all, limit).tolist() == expected
    assert chain.hashed <= 17 * (len(expected) + 1), "what is hashed behind the first miss is bounded"
    assert walk(chain, find_all, limit).tolist() == expected, "half-hashed chains walk the same way"


@given(tokens, st.integers(1, 4), st.data())
def test_rows_of_keys_and_tokens_are_those_of_the_blocks(ids: bytes, width: int, data: st.DataObject) -> None:
    chain, reference = BlockChain(ids, width, 9), BlockChain(ids, width, 9)
    start = data.draw(st.integers(0, len(chain)))
    stop = data.draw(st.integers(start, len(chain)))
    assert [key.tobytes() for key in chain.key_rows(start, stop)] == [reference.key(i) for i in range(start, stop)]
    rows = chain.token_rows[start:stop]
    assert rows.shape == (stop - start, width)
    assert rows.tobytes() == b"".join(reference.block(i) for i in range(start, stop))


def test_rows_of_tokens_stay_as_they_are_when_tokens_come() -> None:
    ids = np.arange(8, dtype="<u4").tobytes()
    chain = BlockChain(ids, 2, 0)
    views = []
    for number in range(50):
        views.append(chain.token_rows)
        chain.append(np.array([100 + number], "<u4").tobytes())
    assert all(view.tobytes() == chain.blocks(len(view)) for view in views)
    assert chain.tokens == 58


def test_a_walk_in_batches_gives_its_rows_as_it_finds_them() -> None:
    chain = BlockChain(bytes(4 * 10_000), 1, 0)
    asked: list[int] = []

    def find_all(keys: bytes) -> Rows:
        asked.append(len(keys) // 16)
        return np.where(np.arange(asked[-1]) < 5000, sum(asked), -1)

    batches = chain.walk_batches(find_all, 9000)
    assert next(batches).tolist() == [1]
    assert asked == [1], "the rest is not hashed before somebody asks for it"
    assert [len(rows) for rows in batches] == [16, 256, 2048, 2048, 2048, 2048, 535]
    assert asked == [1, 16, 256, 2048, 2048, 2048, 2048, 535]
