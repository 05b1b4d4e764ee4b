"""Blocks in parts: each rank fills its own, and a block is there when all of it is."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest

from prefixd.base.errors import InvalidArgumentError, PreconditionError
from prefixd.cache import BlockChain, Reservation, Trie
from prefixd.cache.index.trie import CPU, DISK
from prefixd.cache.rules import FullAttention, GroupRule, SlidingWindow
from prefixd.cache.sessions.reservations import ToFill, present
from tests.cache.index.entering import enter_chain
from tests.rig import MakeRig


async def test_a_block_matches_when_every_rank_has_committed(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    home = rig.register("tp2", parts=2)
    assert await rig.put([1, 2], namespace=home, parts=[0]) == (2, 0)
    assert await rig.get([1, 2], namespace=home) == 0
    assert await rig.put([1], namespace=home, parts=[1]) == (1, 0)
    assert await rig.get([1, 2], namespace=home) == 1
    assert await rig.put([1, 2], namespace=home, parts=[1]) == (1, 0)
    assert await rig.get([1, 2], namespace=home) == 2


async def test_a_rank_reserves_only_what_it_has_not_committed(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    home = rig.register("tp2", parts=2)
    await rig.put([1, 2], namespace=home, parts=[1])
    chain = rig.chain([1, 2, 3], home)
    again = await rig.cache.reserve(rig.session, home, chain, ToFill([1]))
    assert isinstance(again, Reservation) and (again.first_block, len(again.slots)) == (2, 1)
    other = await rig.cache.reserve(rig.session, home, chain, ToFill([0]))
    assert isinstance(other, Reservation) and (other.first_block, len(other.slots)) == (0, 3)


async def test_ranks_that_fill_at_once_do_not_see_each_other(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    home = rig.register("tp2", parts=2)
    reservations = [
        await rig.cache.reserve(rig.session, home, rig.chain([1, 2], home), ToFill([rank])) for rank in (0, 1)
    ]
    for reservation in reservations:
        assert isinstance(reservation, Reservation)
        rig.fill(reservation)
        assert await rig.cache.commit(reservation, 2) == (2, 0)
    assert await rig.get([1, 2], namespace=home) == 2
    assert rig.cache.tiers.arena.pages.slots_used == 4


async def test_who_brings_all_parts_completes_a_torn_block(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    home = rig.register("tp2", parts=2)
    await rig.put([1], namespace=home, parts=[0])
    assert await rig.put([1], namespace=home) == (1, 0)
    assert await rig.get([1], namespace=home) == 1
    assert rig.cache.tiers.arena.pages.slots_used == 2, "the part that was there already is not kept twice"


async def test_a_late_part_does_not_hide_the_copy_on_disk(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=8)
    home = rig.register("tp2", parts=2)
    late = await rig.cache.reserve(rig.session, home, rig.chain([1], home), ToFill([0]))
    assert isinstance(late, Reservation)
    rig.fill(late)
    await rig.put([1], namespace=home, durable=True)
    trie = rig.cache.tries[late.trie.ordinal]
    row = rig.rows([1], home)[0]
    assert (
        len(await rig.cache.mover.slots.allocate(rig.cache.tiers.shared, (4096, 4096), 1)) == 1
    )  # presses the block out of the CPU tier
    rig.cache.tiers.shared.free(list(rig.cache.tiers.shared.in_flight.keys() - {late.slots[0][0]}))
    assert trie.slots[row, CPU].tolist() == [-1, -1]
    assert await rig.cache.commit(late, 1) == (1, 0)
    assert (trie.has(row, CPU), trie.has(row, DISK)) == (False, True)
    assert await rig.get([1], namespace=home) == 1
    assert trie.has(row, CPU)


async def test_torn_blocks_give_way_leaves_first(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=8)
    home = rig.register("tp2", parts=2)
    await rig.put([1, 2], namespace=home, parts=[0])
    assert await rig.put([5, 6, 7]) == (3, 0)
    assert await rig.get([5, 6, 7]) == 3
    assert len(rig.cache.trie(home)) == 1


async def test_durable_needs_all_parts(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8)
    home = rig.register("tp2", parts=2)
    with pytest.raises(PreconditionError, match="2 of the blocks lack parts"):
        await rig.put([1, 2], namespace=home, parts=[0], durable=True)
    assert await rig.put([1, 2], namespace=home, parts=[1], durable=True) == (2, 0)
    await rig.restart()
    home = rig.register("tp2", parts=2)
    assert await rig.get([1, 2], namespace=home) == 2


@pytest.mark.parametrize(
    ("parts", "message"),
    [([2], "part 2 does not exist; the namespace has parts 0 to 1"), ([-1], "part -1"), ([1, 1], "name one twice")],
)
async def test_parts_that_do_not_exist_are_refused(make_rig: MakeRig, parts: list[int], message: str) -> None:
    rig = make_rig()
    home = rig.register("tp2", parts=2)
    with rig.nothing_lost(), pytest.raises(InvalidArgumentError, match=message):
        await rig.cache.reserve(rig.session, home, rig.chain([1], home), ToFill(parts))
    assert home.check_parts([]) == (0, 1)
    assert home.check_parts([1]) == (1,)


def instructions(work: Callable[[], object]) -> int:
    """How many instructions of Python `work` executes, in all functions that it calls.

    Without collections of garbage, which come when they come and whose callbacks (hypothesis has one) count, too.
    """
    executed = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal executed
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        executed += event == "opcode"
        return count

    before = sys.gettrace()
    gc.disable()
    sys.settrace(count)
    try:
        work()
    finally:
        sys.settrace(before)
        gc.enable()
    return executed


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("parts", [(0,), (1,), (0, 1)])
def test_what_a_rank_has_is_found_without_a_loop_over_blocks(parts: Sequence[int], window: bool) -> None:
    """Saving calls this for each prompt: 17 ms for 8,192 blocks when it was a loop."""
    rules: list[GroupRule] = [SlidingWindow(2)] * 2 if window else [FullAttention()] * 2
    executed = []
    for blocks in (20, 5000):
        trie = Trie(1, (1, 1), rules=rules)
        path = enter_chain(trie, BlockChain(np.arange(blocks, dtype="<u4").tobytes(), 1, 0))
        slots = np.stack([np.arange(blocks), np.full(blocks, -1)], axis=1)
        slots[: blocks // 2, 1] = np.arange(blocks // 2)
        trie.put_copies(path, CPU, slots, 0.0)  # rank 0 has committed all, rank 1 half of the blocks
        has = blocks if parts == (0,) else blocks // 2
        assert present(trie, path, parts, 0, CPU) == has
        executed.append(instructions(lambda trie=trie, path=path: present(trie, path, parts, 0, CPU)))  # type: ignore[misc]
    assert executed[0] == executed[1] > 0
