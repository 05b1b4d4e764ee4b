"""Flipped bits, lost files, a full file system: counted, reported, and never served."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from prefixd.cache import CPU, DISK
from prefixd.errors import ExhaustedError
from prefixd_swap import StorageError

if TYPE_CHECKING:
    from tests.cache.conftest import Rig

MakeRig = Callable[..., "Rig"]


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


async def test_a_damaged_block_goes_with_its_descendants(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=16)
    await rig.put([1, 2, 3, 4], durable=True)
    await rig.put([1, 2, 5], durable=True)
    await rig.put([1, 9], durable=True)
    await rig.restart()
    rig.damage(rig.rows([1, 2])[1])
    assert await rig.get([1, 2]) == 1
    await rig.check_disk()
    assert rig.cache.residency.lost == {"checksum mismatch on disk": 1}
    assert [len(rig.rows(p)) for p in ([1, 2, 3, 4], [1, 2, 5], [1, 9])] == [1, 1, 2]
    assert len(rig.trie) == 2
    assert await rig.put([1, 2, 3, 4], durable=True) == (3, 0), "computed again"
    await rig.restart()
    assert await rig.get([1, 2, 3, 4]) == 4


async def test_what_follows_a_damaged_block_comes_back_with_it(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=16)
    await rig.put([1, 2, 3, 4], durable=True)
    await rig.restart()
    rig.damage(rig.rows([1, 2, 3, 4])[1])
    assert await rig.get([1, 2, 3, 4]) == 1, "the lease ends before the damage, though 3 and 4 were read"
    assert await rig.put([1, 2, 3, 4]) == (1, 2)
    assert await rig.get([1, 2, 3, 4]) == 4


async def test_a_copy_above_outlives_the_damage(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4, cpu=4, disk=8)
    await rig.put([1, 2], durable=True)
    rows = rig.rows([1, 2])
    rig.damage(rows[0])
    assert await rig.get([1, 2]) == 2
    assert not rig.cache.residency.lost, "nobody had to read it"


async def test_blocks_in_memory_survive_a_damaged_ancestor_while_leased(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=8)
    await rig.put([1, 2, 3, 4], durable=True)
    await rig.restart()
    lease = await rig.lease([1, 2, 3], first_block=2)
    rig.damage(rig.rows([1])[0])
    assert await rig.get([1, 2, 3]) == 0
    assert lease is not None
    rig.check_lease(lease, rig.namespace, rig.chain([1, 2, 3]), first_block=2)
    rig.check()
    rig.cache.release(rig.session, lease.id)
    assert await rig.put([1, 2, 3, 4]) == (4, 0) or len(rig.rows([1, 2, 3])) == 3
    assert await rig.get([1, 2, 3]) == 3


async def test_a_deleted_slab_is_a_loss_and_no_more(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8)
    await rig.put([1, 2], durable=True)
    await rig.restart()
    for slab in rig.path.rglob("*.slab"):
        os.truncate(slab, 0)
    assert await rig.get([1, 2]) == 0
    assert sum(rig.cache.residency.lost.values()) > 0
    await rig.check_disk()
    assert len(rig.trie) == 0
    assert await rig.put([1, 2]) == (2, 0)
    assert await rig.get([1, 2]) == 2


async def test_a_full_file_system_is_reported_and_the_rest_goes_on(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=64)
    rig.ops.fail = full()
    with pytest.raises(ExhaustedError, match="the blocks are cached, but the disk tier has no room for them: No space"):
        await rig.put([1, 2], durable=True)
    assert "No space left" in rig.cache.tiers.trouble[DISK]
    assert rig.cache.residency.lost["disk write failed"] == 2
    assert rig.cache.tiers.below(CPU) is None
    for prompt in range(10, 20):
        assert await rig.put([prompt, 7]) == (2, 0)
        assert await rig.get([prompt, 7]) == 2
    rig.ops.fail = None
    assert rig.store is not None
    rig.store._slabs._full_at = None  # as if somebody had freed space
    await rig.put([1, 2], durable=True)
    assert not rig.cache.tiers.trouble[DISK]
    await rig.restart()
    assert await rig.get([1, 2]) == 2


async def test_the_trouble_stays_until_something_is_written(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=64)
    rig.ops.fail = full()
    await rig.put([1, 2])
    for _ in range(2):  # the second time, the store knows and just has no room
        assert await rig.cache.write_back.flush() == 0
        assert "No space left" in rig.cache.tiers.trouble[DISK]


async def test_a_failing_device_costs_no_block_that_is_on_it(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=8)
    await rig.put([1, 2], durable=True)
    await rig.put([5, 6])
    rig.ops.fail = broken()
    assert await rig.cache.write_back.flush() == 0
    assert "Input/output error" in rig.cache.tiers.trouble[DISK]
    assert rig.tiers([1, 2], DISK) == [True, True]
    rig.ops.fail = None
    assert await rig.cache.write_back.flush() == 2


async def test_a_removal_that_fails_is_said_and_its_block_comes_back(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=4, disk=4)
    await rig.put([1, 2], durable=True)
    assert rig.store is not None

    def refuse(ids: object) -> None:
        raise StorageError("the index cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "remove", refuse)
        with pytest.raises(StorageError, match="index cannot be written"):
            await rig.cache.residency.forget(rig.trie, rig.rows([1, 2])[::-1])
    rig.check()
    assert rig.rows([1, 2]) == []
    await rig.restart()
    assert await rig.get([1, 2]) == 2


async def test_an_eviction_that_fails_on_disk_fails_no_caller(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=2, disk=2)
    await rig.put([1, 2], durable=True)
    await rig.put([3, 4])
    assert rig.store is not None

    def refuse(ids: object) -> None:
        raise StorageError("the index cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "remove", refuse)
        assert await rig.put([5, 6]) == (2, 0)
    assert "index cannot be written" in rig.cache.tiers.trouble[DISK]
    assert await rig.get([5, 6]) == 2
    await rig.restart()
