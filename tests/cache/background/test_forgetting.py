"""Many blocks are forgotten a slice at a time: what others do in between is theirs, and every moment adds up."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import msgspec
import numpy as np
import pytest

from prefixd.cache import NamespaceSpec, PartSpec
from prefixd.cache.audit.integrity import audit
from prefixd.cache.background import forgetting
from prefixd.cache.background.forgetting import FoundBlocks, find_namespaces, find_subtree, forget, with_images
from prefixd.cache.index.trie import CPU
from tests.rig import BLOCK_TOKENS, MakeRig, Rig
from tests.tries import forget_blocks


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLICE_ROWS", "_WALK_STEPS", "_FORGOTTEN_AT_ONCE"):
        monkeypatch.setattr(forgetting, name, 3)
    monkeypatch.setattr(forgetting, "_DURABLE_AT_ONCE", 6)


async def totals(rig: Rig, blocks: FoundBlocks) -> tuple[int, int]:
    """How many went and how many stayed."""
    evicted = kept = 0
    async with aclosing(forget(rig.cache.mover, blocks)) as steps:
        async for went, stayed in steps:
            evicted, kept = evicted + went, kept + stayed
            rig.check()
    return evicted, kept


async def test_a_prefix_goes_with_what_continues_it(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=40, disk=40)
    for last in range(8):
        await rig.put([1, 2, 10 + last], durable=last % 2 == 0)
    await rig.put([1, 3])
    blocks = await find_subtree(rig.trie, rig.rows([1, 2])[1])
    assert len(blocks) == 9
    assert await totals(rig, blocks) == (9, 0)
    assert len(rig.rows([1, 2])) == 1 and len(rig.rows([1, 3])) == 2
    await rig.check_disk()
    await rig.restart()
    assert rig.restored == 1


async def test_images_go_with_the_namespace_whose_prompts_show_them(make_rig: MakeRig) -> None:
    """Of every shape that they have had; not those of other users, nor a client's of the same name."""
    rig = make_rig(cpu=40)
    part = PartSpec("full", 0, rig.part_bytes)
    model = NamespaceSpec("5f1e", BLOCK_TOKENS, (part,), worker=True)
    images = [model.for_images(tokens, part) for tokens in (BLOCK_TOKENS, 2 * BLOCK_TOKENS)]
    others = [
        *(msgspec.structs.replace(images[0], **change) for change in ({"salt": b"s"}, {"tenant": "t"}, {"dtype": "x"})),
        *(msgspec.structs.replace(spec, worker=False) for spec in (model, images[0])),
    ]
    homes = [rig.cache.register(spec) for spec in (model, *images, *others)]
    namespaces = rig.cache.namespaces
    assert [each.spec for each in await with_images(namespaces, homes[0])] == [model, *images]
    assert await with_images(namespaces, homes[1]) == homes[1:2], "images alone"
    assert await with_images(namespaces, homes[-2]) == homes[-2:-1], "a client's namespace has no images beside it"


async def test_a_namespace_goes_and_others_stay(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=40, disk=40)
    other = rig.cache.register(NamespaceSpec("other", BLOCK_TOKENS, (PartSpec("full", 0, rig.part_bytes),)))
    for first in range(5):
        await rig.put([first, 1, 2], durable=True)
        await rig.put([first, 1], namespace=other, durable=True)
    assert await totals(rig, await find_namespaces(rig.trie, (rig.namespace.ordinal,))) == (15, 0)
    assert [len(rig.rows([0, 1], other)), len(rig.trie)] == [2, 10]
    assert await totals(rig, await find_namespaces(rig.trie, None)) == (10, 0)
    assert len(rig.trie) == 0
    await rig.check_disk()


async def test_an_audit_between_two_slices_finds_nothing_wrong(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=40, disk=40)
    for first in range(5):
        await rig.put([first, 1, 2], durable=True)
    wrong: list[list[str]] = []

    async def look() -> None:
        wrong.append((await audit(rig.cache)).violations)

    blocks = await find_namespaces(rig.trie, None)
    monkeypatch.setattr(forgetting, "give_way", look)
    assert await totals(rig, blocks) == (15, 0)
    assert wrong == [[]] * 5
    assert not list(rig.cache.mover.disk.removals.leaving)
    await rig.check_disk()


async def test_what_is_held_or_pinned_stays_with_its_prefix(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=40)
    for first in range(5):
        await rig.put([first, 1, 2, 3])
    lease = await rig.lease([2, 1, 2])
    assert lease is not None
    rig.trie.pinned[rig.rows([4, 1])] = True
    assert await totals(rig, await find_namespaces(rig.trie, None)) == (20 - 3 - 2, 5)
    assert [len(rig.rows([first, 1, 2, 3])) for first in range(5)] == [0, 0, 3, 0, 2]


async def test_a_row_that_has_another_block_meanwhile_is_left_alone(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=40)
    await rig.put([1, 2, 3, 4])
    blocks = await find_namespaces(rig.trie, None)
    assert await forget_blocks(rig.cache.mover, rig.trie, rig.rows([1, 2, 3, 4])[::-1]) == 4
    await rig.put([7, 8, 9])
    assert set(rig.rows([7, 8, 9])) < set(blocks.rows.tolist())
    assert await totals(rig, blocks) == (0, 0)
    assert len(rig.rows([7, 8, 9])) == 3


async def test_what_is_added_meanwhile_stays_with_its_prefix(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=40)
    await rig.put([1, 2, 3, 4])
    blocks = await find_subtree(rig.trie, rig.rows([1])[0])
    await rig.put([1, 2, 9])
    assert await totals(rig, blocks) == (2, 2)
    assert len(rig.rows([1, 2, 9])) == 3


async def test_a_walk_begins_again_when_its_place_has_gone(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=40)
    for last in range(10):
        await rig.put([1, 10 + last])
    finding = asyncio.create_task(find_subtree(rig.trie, rig.rows([1])[0]))
    await asyncio.sleep(0)
    for last in range(9):  # where the walk has stopped, too
        await forget_blocks(rig.cache.mover, rig.trie, rig.rows([1, 10 + last])[1:])
    assert sorted((await finding).rows.tolist()) == sorted(rig.rows([1, 19]))


async def test_a_prefix_that_goes_meanwhile_is_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=40)
    await rig.put([1, 2, 3, 4, 5, 6, 7])
    finding = asyncio.create_task(find_subtree(rig.trie, rig.rows([1])[0]))
    await asyncio.sleep(0)
    await forget_blocks(rig.cache.mover, rig.trie, rig.rows([1, 2, 3, 4, 5, 6, 7])[::-1])
    assert len(await finding) == 0


async def test_what_a_cancelled_call_has_dropped_is_gone_from_disk_too(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=40, disk=40)
    for first in range(6):
        await rig.put([first, 1, 2], durable=True)
    blocks = await find_namespaces(rig.trie, None)

    async def evict() -> None:
        async for _ in forget(rig.cache.mover, blocks):
            raise AssertionError("it was cancelled before the first part was done")

    for callbacks in range(1, 4):
        before = len(rig.trie)
        task = asyncio.create_task(evict())
        for _ in range(callbacks):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await rig.check_disk()
        blocks = await find_namespaces(rig.trie, None)
        assert len(blocks) == len(rig.trie)
    assert 0 < len(rig.trie) < 18 and before > len(rig.trie)
    assert rig.trie.copies(CPU).tolist() == np.sort(blocks.rows).tolist()


async def test_others_have_their_turn(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=64)
    for first in range(16):
        await rig.put([first, 1, 2])
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    assert await totals(rig, await find_namespaces(rig.trie, None)) == (48, 0)
    task.cancel()
    assert turns >= 48 // 3 + 48 // 3
