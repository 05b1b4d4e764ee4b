"""What the cache has that is nearest to a prompt's first missing block, against a search of all blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefixd.cache import Namespace, NamespaceSpec, PartSpec, TieredCache
from prefixd.cache.index.trie import CPU
from prefixd.cache.placement.lacked_blocks import note_missing
from prefixd.observability.explanations import Difference, Elsewhere
from prefixd.observability.missing_blocks import MissingBlocks
from prefixd.server.request_records import nearest_prefix
from prefixd.server.request_records.nearest_prefix import find_difference, find_elsewhere
from tests.rig import OpenCache

TOKENS = 4
PART = PartSpec("full", 0, 4096)


@pytest.fixture
async def cache() -> AsyncIterator[TieredCache]:
    opened = OpenCache(cpu_bytes=1 << 20, clock=lambda: 1000.0)
    yield opened.cache
    await opened.close(check=False)


def store(cache: TieredCache, home: Namespace, tokens: Sequence[int]) -> None:
    chain, trie = cache.chain(home, np.array(tokens, "<u4").tobytes()), cache.trie(home)
    rows, _ = trie.insert_path(home.root, home.ordinal, chain.key_rows(0, len(chain)), chain.token_rows, 0.0)
    trie.put_copies(rows, CPU, rows[:, None] * 4096, 0.0)  # its slots are nobody's: nothing here reads bytes


def missing(cache: TieredCache, home: Namespace, tokens: Sequence[int]) -> MissingBlocks:
    chain, trie = cache.chain(home, np.array(tokens, "<u4").tobytes()), cache.trie(home)
    found = note_missing(home, chain, len(trie.nodes(home.root, chain)), len(chain))
    assert found is not None
    return found


async def test_the_first_token_that_differs(cache: TieredCache) -> None:
    home = cache.register(NamespaceSpec("m", TOKENS, (PART,)))
    assert await find_difference(cache, missing(cache, home, range(8))) is None, "nothing is cached"
    store(cache, home, range(12))
    store(cache, home, [*range(8), 90, 91, 92, 93])
    store(cache, home, range(50, 62))
    differs = await find_difference(cache, missing(cache, home, [*range(8), 8, 9, 77, 11]))
    assert differs == Difference(token=10, block=2, expected=10, actual=77, equal=3, compared=4)
    differs = await find_difference(cache, missing(cache, home, [50, 51, 52, 99]))
    assert differs == Difference(token=3, block=0, expected=53, actual=99, equal=3, compared=4)
    differs = await find_difference(cache, missing(cache, home, [99, 1, 2, 3]))
    assert differs == Difference(token=0, block=0, expected=0, actual=99, equal=3, compared=4)
    assert await find_difference(cache, missing(cache, home, range(16))) is None, "the cached prefix ends there"
    before = missing(cache, home, range(16))
    store(cache, home, range(16))
    assert await find_difference(cache, before) is None, "its own block does not count"


async def test_others_run_while_many_blocks_are_compared(cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
    home, turns = cache.register(NamespaceSpec("m", TOKENS, (PART,))), 0
    for number in range(40):
        store(cache, home, [*range(4), number, 1, 2, 3])
    lacked = missing(cache, home, [*range(4), 17, 1, 2, 99])
    at_once = await find_difference(cache, lacked)

    async def give_way() -> None:
        nonlocal turns
        turns += 1

    monkeypatch.setattr(nearest_prefix, "give_way", give_way)
    monkeypatch.setattr(nearest_prefix, "_COMPARED_AT_ONCE", 4 * TOKENS)
    assert await find_difference(cache, lacked) == at_once is not None
    assert at_once.token == 7 and turns == 9


async def test_a_namespace_that_is_gone_has_nothing(cache: TieredCache) -> None:
    home = cache.register(NamespaceSpec("m", TOKENS, (PART,)))
    gone = MissingBlocks(b"12345678", TOKENS, 0, 2, b"", bytes(16), bytes(32))
    assert await find_difference(cache, gone) is None and await find_elsewhere(cache, gone) is None
    assert home is not None


async def test_another_namespace_has_the_prompt(cache: TieredCache) -> None:
    spec = NamespaceSpec("m", TOKENS, (PART,), salt=b"one")
    one = cache.register(spec)
    two = cache.register(NamespaceSpec("m", TOKENS, (PART,), salt=b"two"))
    three = cache.register(NamespaceSpec("other", TOKENS, (PART,), tenant="b"))
    store(cache, three, range(8))
    lacked = missing(cache, two, range(8))
    assert await find_elsewhere(cache, lacked) == Elsewhere("other", "b", ("tenant", "name", "salt"))
    store(cache, one, range(4))
    assert await find_elsewhere(cache, lacked) == Elsewhere("m", "default", ("salt",)), "its own tenant's first"
    assert await find_elsewhere(cache, missing(cache, two, range(1, 9))) is None
    store(cache, two, range(4))
    assert await find_elsewhere(cache, missing(cache, two, range(8))) is None, "its own namespace has the first block"


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=8, max_size=8), min_size=1, max_size=6),
    st.lists(st.integers(0, 2), min_size=8, max_size=8),
)
async def test_it_is_the_nearest_one(stored: list[list[int]], prompt: list[int]) -> None:
    opened = OpenCache(cpu_bytes=1 << 20, clock=lambda: 1000.0)
    try:
        cache = opened.cache
        home = cache.register(NamespaceSpec("m", TOKENS, (PART,)))
        for tokens in stored:
            store(cache, home, tokens)
        if prompt in stored:
            return
        lacked = missing(cache, home, prompt)
        first = lacked.found * TOKENS
        blocks = [tokens[first : first + TOKENS] for tokens in stored if tokens[:first] == prompt[:first]]
        wanted, found = prompt[first : first + TOKENS], await find_difference(cache, lacked)
        if not blocks:
            assert found is None
            return
        same = [[one == other for one, other in zip(block, wanted, strict=True)] for block in blocks]
        assert found is not None
        best = max((each.index(False), sum(each)) for each in same)
        assert (found.token - first, found.equal) == best
        assert found.actual == prompt[found.token] != found.expected
    finally:
        await opened.close(check=False)
