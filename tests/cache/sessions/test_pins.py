"""Pins: no eviction takes what is pinned, and where there is a disk they outlast restarts."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from prefixd.cache import BlockChain, Trie
from prefixd.cache.index.trie import CPU, DISK
from prefixd.cache.moving.victims import Search, find_victims
from prefixd.cache.rules import FullAttention, SlidingWindow
from prefixd.cache.sessions.pins import restore_pins
from tests.cache.index.entering import enter_chain
from tests.rig import Disk, MakeRig, Rig


def path(rig: Rig, prompt: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(rig.rows(prompt), np.int64)


async def pin(rig: Rig, prompt: list[int]) -> str:
    return await rig.cache.pins.pin(rig.trie, path(rig, prompt))


async def unpin(rig: Rig, prompt: list[int]) -> tuple[int, str]:
    return await rig.cache.pins.unpin(rig.trie, path(rig, prompt))


def pinned(rig: Rig, prompt: list[int]) -> list[bool]:
    found: list[bool] = rig.trie.pinned[path(rig, prompt)].tolist()
    return found


async def test_a_pinned_prefix_is_written_and_pinned_again_after_a_restart(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=20)
    await rig.put([1, 2, 3])
    assert rig.tiers([1, 2, 3], DISK) == [False] * 3
    assert await pin(rig, [1, 2]) == ""
    assert rig.tiers([1, 2, 3], DISK) == [True, True, False]
    await rig.restart()
    assert pinned(rig, [1, 2, 3]) == [True, True]
    assert await rig.get([1, 2]) == 2
    assert await unpin(rig, [1, 2]) == (2, "")
    assert pinned(rig, [1, 2]) == [False, False]
    await rig.restart()
    assert pinned(rig, [1, 2]) == [False, False]


async def test_without_a_disk_a_pin_holds_until_a_restart_and_says_so(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4)
    await rig.put([1, 2])
    assert await pin(rig, [1, 2]) == "there is no disk tier; set disk.bytes"
    await rig.put([3, 4, 5])
    assert pinned(rig, [1, 2]) == [True, True], "but others gave way"
    assert await unpin(rig, [1, 2]) == (2, "")


async def test_what_is_pinned_stays_on_disk_though_memory_has_it_too(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=4)
    await rig.put([1, 2], durable=True)
    await pin(rig, [1, 2])
    for first in range(3, 9):
        await rig.put([first, first], durable=True)
        await rig.get([1, 2])  # so that memory has it always
    assert rig.tiers([1, 2], CPU) == [True, True]
    assert rig.tiers([1, 2], DISK) == [True, True]
    await rig.restart()
    assert pinned(rig, [1, 2]) == [True, True]


async def test_a_full_disk_of_pins_refuses_another_and_says_why(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=2)
    await rig.put([1, 2], durable=True)
    assert await pin(rig, [1, 2]) == ""
    await rig.put([3])
    assert "no room for them; unpin other prefixes or raise disk.bytes" in await pin(rig, [3])
    assert (pinned(rig, [3]), rig.tiers([1, 2], DISK)) == ([True], [True, True])
    await rig.restart()
    assert (rig.rows([3]), pinned(rig, [1, 2])) == ([], [True, True])


async def test_a_pin_that_a_broken_disk_refused_is_durable_once_its_blocks_are_written(make_rig: MakeRig) -> None:
    disk = Disk()
    rig = make_rig(cpu=8, disk=20, ops=disk)
    await rig.put([1, 2])
    disk.fail = OSError(errno.EIO, "broken")
    assert "disk" in await pin(rig, [1, 2])
    assert pinned(rig, [1, 2]) == [True, True]
    disk.fail = None
    rig.clock.now += 1000
    assert await rig.cache.persist(rig.namespace, rig.chain([1, 2])) == 2
    await rig.restart()
    assert pinned(rig, [1, 2]) == [True, True]


async def test_an_unpin_that_a_broken_disk_refused_says_that_it_comes_back(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=20)
    await rig.put([1, 2])
    await pin(rig, [1, 2])
    rig.durable.writable = False
    blocks, why = await unpin(rig, [1, 2])
    assert (blocks, bool(why), pinned(rig, [1, 2])) == (2, True, [False, False])
    rig.durable.writable = True
    await rig.restart()
    assert pinned(rig, [1, 2]) == [True, True]


async def test_a_damaged_block_takes_its_pin_with_it_and_has_it_again_when_it_is_written(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=20)
    await rig.put([1, 2])
    await pin(rig, [1, 2])
    row = rig.rows([1, 2])[1]
    rig.damage(row)
    async for _ in rig.cache.scrubber.verify():
        pass
    await rig.cache.mover.quiesce()
    assert rig.store is not None
    assert [key for _, key in rig.store.pins()] == [rig.trie.key(rig.rows([1])[0])]
    assert await rig.cache.persist(rig.namespace, rig.chain([1, 2])) == 2
    await rig.restart()
    assert pinned(rig, [1, 2]) == [True, True]


async def test_an_unpin_waits_for_the_pin_before_it(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=20)
    await rig.put([1, 2])
    first, (blocks, why) = await asyncio.gather(pin(rig, [1, 2]), unpin(rig, [1, 2]))
    assert (first, blocks, why, pinned(rig, [1, 2])) == ("", 2, "", [False, False])
    await rig.restart()
    assert pinned(rig, [1, 2]) == [False, False]


async def test_of_two_namespaces_in_one_trie_each_has_its_own_pins(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=20)
    other = rig.register("other")
    await rig.put([1, 2])
    await rig.put([1, 2], namespace=other)
    await pin(rig, [1])
    rows = np.array(rig.rows([1, 2], other), np.int64)
    assert await rig.cache.pins.pin(rig.cache.trie(other), rows) == ""
    await rig.restart()
    other = rig.register("other")
    assert pinned(rig, [1, 2]) == [True]
    assert rig.trie.pinned[rig.rows([1, 2], other)].tolist() == [True, True]


async def test_a_pin_is_for_a_block_of_its_own_namespace(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=20)
    other = rig.register("other")
    await rig.put([1])
    await pin(rig, [1])
    ((_, key),) = rig.durable.pins()
    with patch.object(rig.durable, "pins", return_value=[(other.id, key)]):  # of a block that did not come back
        assert restore_pins(rig.durable, {other.id: other}, rig.cache.trie) == 0


async def test_a_pinned_parent_does_not_leave_the_disk_with_its_child(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=20)
    await rig.put([1, 2], durable=True)
    await pin(rig, [1])
    ((trie, rows),) = await find_victims(rig.cache.tries, Search(DISK, rig.cache.policy, demotable=False), 2)
    assert (trie, rows.tolist()) == (rig.trie, rig.rows([1, 2])[1:])


def test_a_longer_prompt_takes_nothing_from_a_pinned_one() -> None:
    """Of a window, the bytes that the pinned prefix needs are still there when others continue it."""
    trie = Trie(1, (10, 10), rules=[FullAttention(), SlidingWindow(1)])
    rows = enter_chain(trie, BlockChain(np.arange(6, dtype="<u4").tobytes(), 1, 0))
    trie.pinned[rows[:3]] = True
    trie.expire(rows)
    assert [bool(expired) for expired in trie.expired[rows]] == [False, False, False, True, True, False]


_DIES = """
import asyncio, os, sys
from pathlib import Path
from unittest.mock import patch
import numpy as np
from tests.rig import Rig

async def main():
    rig = Rig(Path(sys.argv[1]), cpu=8, disk=20)
    await rig.put([1, 2])
    if sys.argv[2] != "answer":
        setattr(rig.store, sys.argv[2], lambda *args: os._exit(7))
    assert await rig.cache.pins.pin(rig.trie, np.array(rig.rows([1, 2]))) == ""
    os._exit(7)

asyncio.run(main())
"""


@pytest.mark.parametrize(("at", "blocks", "pins"), [("write", 0, 0), ("pin", 2, 0), ("answer", 2, 2)])
@pytest.mark.slow
async def test_a_crash_leaves_no_pin_without_its_block(tmp_path: Path, at: str, blocks: int, pins: int) -> None:
    """The process dies before its first write, between the write and the pin, or with the answer."""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", _DIES, str(tmp_path), at], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 7, done.stderr
    rig = Rig(tmp_path, cpu=8, disk=20)
    assert (len(rig.rows([1, 2])), sum(pinned(rig, [1, 2]))) == (blocks, pins)
    await rig.check_disk()
    await rig.close()
