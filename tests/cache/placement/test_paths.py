"""Finding a long prompt takes many turns of the event loop, and what is found is true when it is returned."""

from __future__ import annotations

import asyncio

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixd.base.errors import ExhaustedError
from prefixd.cache import BlockChain, Namespace, NamespaceSpec, PartSpec, Trie
from prefixd.cache.index.keys.block_keys import HASHED_AT_ONCE
from prefixd.cache.index.trie import CPU, Rows
from prefixd.cache.placement.paths import by_chain, compose, find_ancestry, find_path
from prefixd.cache.rules import FullAttention, SlidingWindow

pytestmark = pytest.mark.usefixtures("turns_by_hand")

ROOT = -1
HOME = Namespace(bytes(8), 7, 0, NamespaceSpec("m", 1, (PartSpec("kv", 0, 1),)))
BLOCKS = 5 * HASHED_AT_ONCE


def chain_of(blocks: int, first_token: int = 0) -> BlockChain:
    tokens = np.arange(first_token, first_token + blocks, dtype="<u4")
    return BlockChain(tokens.tobytes(), 1, 7)


def insert(trie: Trie, chain: BlockChain, namespace: int = 0) -> Rows:
    count = len(chain)
    rows, _ = trie.insert_path(-1 - namespace, namespace, chain.key_rows(0, count), chain.token_rows[:count], 0.0)
    return rows


def turns(trie: Trie, chain: BlockChain, limit: int | None = None) -> int:
    """How often others run while the prompt is looked for."""
    search = find_path(trie, HOME, chain, limit)
    for turn in range(1000):
        try:
            search.send(None)
        except StopIteration:
            return turn
    raise AssertionError("the search does not end")


def test_a_short_prompt_is_found_in_one_turn() -> None:
    trie = Trie(1, (1,))
    insert(trie, chain_of(BLOCKS))
    for blocks in (1, 17, 300, HASHED_AT_ONCE - 1):
        assert turns(trie, chain_of(blocks)) == 0
        assert turns(trie, chain_of(BLOCKS), blocks) == 0
    assert turns(trie, chain_of(BLOCKS, first_token=1)) == 0, "it is not cached"


def test_no_turn_looks_at_more_than_some_thousand_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    trie = Trie(1, (1,))
    insert(trie, chain_of(BLOCKS))
    chain = chain_of(BLOCKS)
    looked_up = [0]
    find_all = trie._keys.find_all

    def counting(keys: npt.NDArray[np.uint8]) -> Rows:
        looked_up[-1] += len(keys)
        return find_all(keys)

    monkeypatch.setattr(trie._keys, "find_all", counting)
    search = find_path(trie, HOME, chain)
    with pytest.raises(StopIteration) as end:
        while True:
            search.send(None)
            assert chain.hashed <= sum(looked_up)
            looked_up.append(0)
    assert len(end.value.value) == BLOCKS
    assert max(looked_up) <= HASHED_AT_ONCE + 1 + 16 + 256


@pytest.mark.parametrize("known", [0, 1, 4000, HASHED_AT_ONCE + 273, HASHED_AT_ONCE + 274, BLOCKS])
@pytest.mark.parametrize("limit", [0, 100, HASHED_AT_ONCE + 273, BLOCKS + 1])
async def test_it_finds_what_a_search_in_one_turn_finds(known: int, limit: int) -> None:
    trie = Trie(1, (1,))
    if known:
        insert(trie, chain_of(known))
    found = await find_path(trie, HOME, chain_of(BLOCKS), limit)
    assert found.tolist() == trie.nodes(ROOT, chain_of(BLOCKS), limit).tolist()
    assert len(found) == min(known, limit)


@pytest.mark.parametrize("same_row", [False, True])
async def test_blocks_that_go_meanwhile_are_not_returned(same_row: bool) -> None:
    """Their rows may have other blocks by then."""
    trie = Trie(1, (1,))
    rows = insert(trie, chain_of(BLOCKS))
    search = asyncio.create_task(find_path(trie, HOME, chain_of(BLOCKS)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not search.done()
    trie.retain(rows[:100])
    trie.remove_all(rows[100:][::-1])
    if same_row:
        insert(trie, chain_of(BLOCKS, first_token=10**6))
    assert (await search).tolist() == rows[:100].tolist()


async def test_what_blocks_continue_is_found_once_each_however_long_the_prompt() -> None:
    trie = Trie(1, (4096,), 0)
    rows = insert(trie, chain_of(4 * BLOCKS))
    others, turns = 0, asyncio.Event()

    async def other() -> None:
        nonlocal others
        while not turns.is_set():
            others += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    found = await find_ancestry(trie, rows[[10, -1, 20]])
    turns.set()
    await beside
    assert sorted(found.tolist()) == sorted(rows.tolist())
    assert others >= 4 * BLOCKS // 8192


def test_a_path_is_composed_of_what_each_namespace_has_more_of() -> None:
    trie = Trie(1, (1, 1), rules=[FullAttention(), SlidingWindow(2)])
    homes = [insert(trie, chain_of(blocks), namespace) for namespace, blocks in ((0, 5), (1, 6))]
    full, window, both = (0, -1), (-1, 0), (0, 0)  # slots of their parts
    for rows, groups in zip(
        homes, [[full, both, None, window, full], [both, full, None, full, full, full]], strict=True
    ):
        for row, slots in zip(rows.tolist(), groups, strict=True):
            if slots is not None:
                trie.put_copies(np.array([row]), CPU, np.array([slots]), 0.0)
    own, common = homes
    assert compose(trie, own, common).tolist() == [common[0], own[1], own[2], own[3], common[4], common[5]]
    assert compose(trie, own, common[:2]).tolist() == [common[0], *own[1:]]
    assert compose(trie, own[:0], common).tolist() == common.tolist()


@pytest.mark.parametrize("at_once", [None, 8])
@given(st.lists(st.integers(0, 30), max_size=40), st.integers(0, 2**32 - 1))
def test_prompts_lie_one_behind_the_other(at_once: int | None, parents: list[int], seed: int) -> None:
    """Whatever the tree, and whichever of its blocks are ordered."""
    trie, chance = Trie(1, (1,)), np.random.default_rng(seed)
    tree: list[int] = []
    for number, choice in enumerate(parents):
        above = tree[choice] if choice < len(tree) else ROOT
        keys = np.full((1, 16), number + 1, np.uint8)
        tree += trie.insert_path(above, 0, keys, np.full((1, 1), number, np.uint32), 0.0)[0].tolist()
    given_rows = chance.permutation(np.array(tree, np.int64)[chance.random(len(tree)) < 0.7])
    with pytest.MonkeyPatch.context() as patch:
        if at_once is not None:
            patch.setattr("prefixd.cache.placement.paths._ORDERED_AT_ONCE", at_once)
        found = asyncio.run(by_chain(trie, given_rows)).tolist()
    assert sorted(found) == sorted(given_rows.tolist())
    place = {row: at for at, row in enumerate(found)}
    children: dict[int, list[int]] = {}
    for row in found:
        if (parent := int(trie.parent[row])) in place:
            assert place[parent] < place[row]
            children.setdefault(parent, []).append(place[row])
    assert all(place[parent] + 1 in places for parent, places in children.items())


def test_parents_come_first_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(work: object) -> Rows:
        raise ExhaustedError("no thread could be started")

    monkeypatch.setattr("prefixd.cache.placement.paths.in_thread", refuse)
    trie = Trie(1, (1,))
    rows = insert(trie, chain_of(BLOCKS))
    assert asyncio.run(by_chain(trie, rows[::-1])).tolist() == rows.tolist()


def test_prompts_keep_their_order() -> None:
    trie = Trie(1, (1,))
    one, other = (insert(trie, chain_of(3, first_token=100 * number)) for number in range(2))
    mixed = np.stack([other, one], 1).ravel()
    assert asyncio.run(by_chain(trie, mixed)).tolist() == [*other.tolist(), *one.tolist()]
    assert not len(asyncio.run(by_chain(trie, mixed[:0])))
