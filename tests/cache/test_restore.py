"""A restart gives back what was durable, as it was, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from prefixd.cache import CPU, DISK, GPU

if TYPE_CHECKING:
    from tests.cache.conftest import Rig

MakeRig = Callable[..., "Rig"]


async def test_durable_blocks_come_back_whole_and_others_do_not(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=16)
    await rig.put([1, 2, 3], durable=True)
    await rig.put([1, 2, 4, 5])
    await rig.restart()
    assert rig.restored == 3
    assert [len(rig.rows(p)) for p in ([1, 2, 3], [1, 2, 4, 5])] == [3, 2]
    assert rig.trie.nearest[rig.rows([1, 2, 3])].tolist() == [DISK] * 3
    assert await rig.get([1, 2, 3]) == 3


async def test_a_durable_commit_covers_the_prefix_before_it(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4, cpu=8, disk=16)
    rig.unhold(await rig.put_gpu([1]), GPU)
    await rig.put([1, 2])
    await rig.put([1, 2, 3], durable=True)
    await rig.restart()
    assert await rig.get([1, 2, 3]) == 3


@pytest.mark.parametrize("nbytes", [100, 4096, 10_000])
async def test_all_namespaces_and_parts_come_back(make_rig: MakeRig, nbytes: int) -> None:
    rig = make_rig(cpu=64, disk=64)
    homes = [rig.register("a", 1, nbytes), rig.register("b", 2, nbytes), rig.register("a", 1, nbytes, salt=b"x")]
    for number, home in enumerate(homes):
        await rig.put([number, 1, 2], namespace=home, durable=True)
        await rig.put([7, 8], namespace=home, durable=True)
    await rig.restart()
    assert rig.restored == 15
    homes = [rig.register("a", 1, nbytes), rig.register("b", 2, nbytes), rig.register("a", 1, nbytes, salt=b"x")]
    for number, home in enumerate(homes):
        assert await rig.get([number, 1, 2], namespace=home) == 3
        assert await rig.get([7, 8], namespace=home) == 2


async def test_restarts_change_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=16)
    await rig.put([1, 2, 3], durable=True)
    for _ in range(3):
        await rig.restart()
        assert rig.restored == 3
        await rig.check_disk()
    assert await rig.get([1, 2, 3]) == 3


async def test_restored_blocks_are_written_no_second_time(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=16)
    await rig.put([1, 2], durable=True)
    await rig.restart()
    assert await rig.get([1, 2]) == 2
    assert await rig.cache.write_back.flush() == 0
    assert rig.store is not None and rig.store.commits == 0


async def test_a_record_of_an_unknown_namespace_is_left_alone(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=4, disk=16)
    await rig.put([1, 2], durable=True)
    other = rig.register("other")
    await rig.put([3], namespace=other, durable=True)
    assert rig.store is not None
    known = rig.store.namespaces()
    del known[other.id]
    monkeypatch.setattr("prefixd_swap.SlabStore.namespaces", lambda self: known)
    await rig.restart()
    assert rig.restored == 2
    monkeypatch.undo()
    await rig.restart()
    assert rig.restored == 3


async def test_a_cache_without_a_disk_restores_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4)
    await rig.put([1, 2])
    assert rig.cache.restore() == 0
    assert rig.tiers([1, 2], CPU) == [True, True]
