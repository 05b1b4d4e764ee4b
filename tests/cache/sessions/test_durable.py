"""Durable means durable: the blocks asked for and all before them, whoever committed them."""

from __future__ import annotations

import pytest

from prefixd.base.errors import ExhaustedError, PreconditionError
from prefixd.cache import Reservation
from prefixd.cache.index.trie import DISK
from tests.rig import MakeRig


async def test_a_durable_commit_covers_the_prefix_before_it(make_rig: MakeRig) -> None:
    rig = make_rig(disk=8)
    await rig.put([1, 2])
    assert rig.tiers([1, 2], DISK) == [False, False]
    await rig.put([1, 2, 3], durable=True)
    assert rig.tiers([1, 2, 3], DISK) == [True] * 3
    await rig.restart()
    assert await rig.get([1, 2, 3]) == 3


async def test_a_durable_commit_of_nothing_covers_it_too(make_rig: MakeRig) -> None:
    rig = make_rig(disk=8)
    await rig.put([1, 2])
    reservation = await rig.cache.reserve(rig.session, rig.namespace, rig.chain([1, 2, 3]))
    assert isinstance(reservation, Reservation)
    assert await rig.cache.commit(reservation, 0, durable=True) == (0, 0)
    assert rig.tiers([1, 2], DISK) == [True, True]
    assert not rig.trie.keep[: rig.trie.rows].any()


async def test_persist_writes_what_is_cached_already(make_rig: MakeRig) -> None:
    rig = make_rig(disk=8)
    await rig.put([1, 2, 3])
    assert await rig.cache.persist(rig.namespace, rig.chain([1, 2, 9])) == 2
    assert rig.tiers([1, 2, 3], DISK) == [True, True, False]
    assert await rig.cache.persist(rig.namespace, rig.chain([1, 2, 3, 4])) == 3
    assert await rig.cache.persist(rig.namespace, rig.chain([7])) == 0
    assert not rig.trie.keep[: rig.trie.rows].any()
    await rig.restart()
    assert await rig.get([1, 2, 3]) == 3


async def test_persist_says_when_it_cannot(make_rig: MakeRig) -> None:
    rig = make_rig()
    with pytest.raises(PreconditionError, match=r"disk\.bytes"):
        await rig.cache.persist(rig.namespace, rig.chain([1]))
    small = make_rig(cpu=8, disk=2)
    await small.put([1, 2, 3, 4])
    with pytest.raises(ExhaustedError, match=r"4 blocks .*, but 2 .* no room for them; raise disk\.bytes"):
        await small.cache.persist(small.namespace, small.chain([1, 2, 3, 4]))
    assert not small.trie.keep[: small.trie.rows].any()


async def test_a_durable_commit_of_small_blocks_pays_for_few_syncs(make_rig: MakeRig) -> None:
    """64 of them shared one: 200,000 were written in 3,125 transactions, which took longer than a call may."""
    rig = make_rig(cpu=1100, disk=1200)
    before = rig.store.commits if rig.store is not None else 0
    assert await rig.put(list(range(1024)), durable=True) == (1024, 0)
    assert rig.store is not None and rig.store.commits - before <= 3
