"""Tenants on one cache: nobody is above its most, within its guarantee nobody loses anything for another, and what is
guaranteed can be had when it is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from prefixd.base.errors import ExhaustedError
from prefixd.base.rules.rules import SlidingWindow
from prefixd.cache import NamespaceSpec, PartSpec, Reservation
from prefixd.cache.index.trie import CPU, DISK, GPU
from prefixd.cache.moving.victims import Limits, find_victims
from prefixd.cache.placement.tenant_use import Losses
from prefixd.cache.sessions.sessions import Process
from tests.cache.tenants.tenant_rig import Home
from tests.rig import MakeRig, Rig
from tests.tries import forget_blocks
from tests.waiting import until

# -- most ----------------------------------------------------------------------------------------------------------


async def test_who_is_at_its_most_loses_blocks_of_its_own_first(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    a, b = Home(rig, "a", {CPU: (0, 3)}), Home(rig, "b")
    await b.put([1, 2, 3])
    await a.put([1])
    await a.put([2, 3])
    assert await a.put([4, 5]) == (2, 0)
    assert (a.has([1], CPU), a.has([2, 3], CPU), a.has([4, 5], CPU)) == (0, 1, 2), "the policy's choice among its own"
    assert b.has([1, 2, 3], CPU) == 3, "though they were used before, and there was room"
    assert (a.used(rig.cache.tiers.shared), b.used(rig.cache.tiers.shared)) == (3, 3)
    assert await a.put([6, 7, 8, 9, 10]) == (3, 0), "a reservation is as long as it may be"


async def test_what_is_in_flight_counts_and_the_refusal_says_whose_limit_it_is(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    a = Home(rig, "a", {CPU: (0, 3)})
    given = await a.reserve([1, 2, 3, 4])
    assert len(given.slots) == 3
    with rig.nothing_lost(), pytest.raises(ExhaustedError, match=r"tenant a: .*tenants\.a\.cpu_most.*set a"):
        await a.reserve([5])
    assert a.tenant.refused == {"cpu_most": 1}
    a.release(given)
    assert await a.put([5]) == (1, 0)


async def test_a_most_that_is_lowered_counts_from_the_next_block_on(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    a = Home(rig, "a", {CPU: (0, 6)})
    await a.put([1, 2, 3, 4, 5])
    a.limit({CPU: (0, 2)})
    assert await a.put([6]) == (1, 0)
    assert a.used(rig.cache.tiers.shared) == 2
    a.limit({CPU: (0, 0)})
    with pytest.raises(ExhaustedError, match=r"tenants\.a\.cpu_most"):
        await a.put([7])
    assert a.used(rig.cache.tiers.shared) == 2, "nothing goes for what never fits"


async def test_a_lease_at_the_most_is_refused_and_what_is_cached_stays(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=8)
    a = Home(rig, "a", {CPU: (0, 2)})
    await a.put([1, 2], durable=True)
    await a.put([3, 4], durable=True)
    assert (a.has([1, 2], CPU), a.has([1, 2], DISK)) == (0, 2)
    lease = await a.lease([3, 4])
    with rig.nothing_lost(), pytest.raises(ExhaustedError, match=r"tenant a: .*tenants\.a\.cpu_most"):
        await a.lease([1, 2])
    a.release(lease)
    lease = await a.lease([1, 2])
    assert lease is not None and len(lease.rows) == 2


async def test_a_lease_for_which_nothing_may_go_is_refused(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4, cpu=4)
    a = Home(rig, "a", {CPU: (0, 2)})
    await gpu_blocks(rig, a, [5, 6])
    await a.put([1, 2])
    rig.cache.trie(a.namespace).pinned[rig.rows([1, 2], a.namespace)] = True
    with rig.nothing_lost(), pytest.raises(ExhaustedError, match=r"tenant a: .*tenants\.a\.cpu_most"):
        await a.lease([5, 6])
    assert await a.lease([7]) is None, "nothing is cached"


async def test_of_own_blocks_of_several_sizes_no_more_go_than_are_needed(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=64)
    large, small = Home(rig, "a", nbytes=8 * 4096), Home(rig, "a", {CPU: (0, 16)})
    await large.put([1])
    await large.put([2])
    assert await small.put([1, 2, 3, 4]) == (4, 0)
    assert (large.has([1], CPU), large.has([2], CPU), small.has([1, 2, 3, 4], CPU)) == (0, 1, 4)


async def test_of_own_blocks_that_are_small_as_many_go_as_are_needed_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=64)
    large, small = Home(rig, "a", nbytes=8 * 4096), Home(rig, "a", {CPU: (0, 16)})
    await small.put(range(1, 17))
    looks = 0

    async def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal looks
        looks += 1
        return await find_victims(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefixd.cache.moving.room.find_victims", counted)
        assert await large.put([1]) == (1, 0)
    assert (large.has([1], CPU), small.has(range(1, 17), CPU)) == (1, 8)
    assert looks <= 2, "all eight are chosen together"


async def test_at_the_most_on_disk_own_blocks_go_and_others_are_written(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8)
    a, b = Home(rig, "a", {DISK: (0, 2)}), Home(rig, "b")
    assert await b.put([1, 2], durable=True) == (2, 0)
    assert await a.put([1, 2], durable=True) == (2, 0)
    assert await a.put([3], durable=True) == (1, 0)
    assert (a.has([1, 2], DISK), a.has([3], DISK), b.has([1, 2], DISK)) == (1, 1, 2)
    refusal = r"tenant a: 3 blocks .* cached, but 1 .*: it has 8192 of 8192 bytes of the disk .*tenants\.a\.disk_most"
    with pytest.raises(ExhaustedError, match=refusal):
        await a.put([5, 6, 7], durable=True)
    assert a.tenant.refused == {"disk_most": 1}
    assert a.used(rig.durable) == 2
    rig.cache.mover.lost.clear()
    await b.put([7, 8])
    assert await rig.cache.write_back.flush() == 2, "b's, in one trie with a's, for which there is no room"
    assert b.has([7, 8], DISK) == 2
    assert rig.cache.mover.lost["not written: its tenant is at its most of the disk tier"] > 0


async def test_blocks_that_cannot_go_down_are_lost_with_the_reason(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=8)
    a = Home(rig, "a", {DISK: (0, 0)})
    await a.put([1, 2, 3, 4])
    await a.put([5, 6])
    assert rig.cache.mover.lost["evicted before it was written: its tenant is at its most of the disk tier"] == 2
    assert a.used(rig.durable) == 0


async def test_write_back_goes_on_behind_blocks_that_cannot_be_written(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=160, disk=160, write_back=True)
    a, b = Home(rig, "a", {DISK: (0, 0)}), Home(rig, "b")
    await a.put(range(100))
    await b.put(range(20))
    rig.start_write_back()
    await until(lambda: b.has(range(20), DISK) == 20)
    assert a.has(range(100), DISK) == 0


async def test_the_gpu_tier_has_a_most_too(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=6, cpu=6)
    a, b = Home(rig, "a", {GPU: (0, 3)}), Home(rig, "b")
    compute, mover = rig.cache.tiers.compute, rig.cache.mover
    await gpu_blocks(rig, b, [1, 2])
    await gpu_blocks(rig, a, [1, 2])
    frames = await mover.slots.take_frames(2, tenant=a.tenant)
    assert frames is not None and a.used(compute) == 3 and a.held(compute) == 2
    assert (a.has([1, 2], GPU), b.has([1, 2], GPU)) == (1, 2)
    rig.own = frames
    assert await mover.slots.take_frames(2, tenant=a.tenant) is None
    assert a.has([1, 2], GPU) == 1, "when not all can be had, nothing goes"
    compute.free(frames)
    rig.own = []


# -- guaranteed ----------------------------------------------------------------------------------------------------


async def test_within_its_guarantee_nobody_loses_a_block_for_another(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=6)
    a, b = Home(rig, "a", {CPU: (3, None)}), Home(rig, "b")
    await a.put([1, 2, 3])
    assert await b.put([1, 2, 3, 4]) == (3, 0), "as many as there are besides"
    assert await b.put([5, 6, 7]) == (3, 0), "at the cost of its own"
    assert (a.has([1, 2, 3], CPU), b.used(rig.cache.tiers.shared)) == (3, 3)
    lease = await b.lease([5, 6, 7])
    with pytest.raises(ExhaustedError):
        await b.put([8])
    b.release(lease)
    lease = await a.lease([1, 2, 3])
    assert await a.put([4, 5]) == (2, 0), "above its guarantee it may be again, at others' cost"
    assert a.used(rig.cache.tiers.shared) == 5


async def test_a_batch_of_victims_stops_where_a_guarantee_begins(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    a, b = Home(rig, "a", {CPU: (3, None)}), Home(rig, "b")
    await a.put([1, 2, 3])
    await a.put([4, 5])
    await b.put([1, 2, 3])
    await b.lease([1])
    assert await b.put([4, 5, 6, 7]) == (4, 0)
    assert a.used(rig.cache.tiers.shared) == 3
    assert (a.has([1, 2, 3], CPU), a.has([4, 5], CPU)) == (1, 2), "the least recently used went first"
    assert (b.has([1, 2, 3], CPU), b.has([4, 5, 6, 7], CPU)) == (1, 4), "then the own ones"


async def test_two_who_make_room_at_once_do_not_take_the_same_surplus(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=6, disk=12)
    a, b, c = Home(rig, "a", {CPU: (3, None)}), Home(rig, "b"), Home(rig, "c")
    for number in range(6):
        await a.put([number])
    given = await asyncio.gather(b.reserve([1, 2]), c.reserve([1, 2]), return_exceptions=True)
    assert a.used(rig.cache.tiers.shared) == 3, "while b's victims are written, c takes no others"
    assert sum(len(each.slots) for each in given if isinstance(each, Reservation)) == 3


async def test_what_is_sent_down_counts_as_gone_for_who_makes_room_meanwhile(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=6, disk=12)
    a, b = Home(rig, "a", {CPU: (3, None)}), Home(rig, "b")
    for number in range(6):
        await a.put([number])
    trie, shared = rig.cache.trie(a.namespace), rig.cache.tiers.shared
    rows = np.array([rig.rows([number], a.namespace)[0] for number in range(3)])
    async with rig.cache.mover.disk.still():  # so that both are under way at once
        sent = asyncio.create_task(rig.cache.mover.send_down("test", trie, rows, shared))
        reserved = asyncio.create_task(b.reserve([1, 2, 3]))
        for _ in range(50):
            await asyncio.sleep(0)
    assert (await sent, len((await reserved).slots)) == (3, 3)
    assert a.used(shared) == 3, "b took the room of what was sent down, nothing of what a is guaranteed"


async def test_two_who_make_room_for_a_tenant_at_its_most_evict_no_more_than_both_need(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=12)
    a = Home(rig, "a")
    for number in range(6):
        await a.put([number])
    a.limit({CPU: (0, 4)})
    async with rig.cache.mover.disk.still():  # so that both are under way at once
        waiting = [asyncio.create_task(a.reserve([number])) for number in (10, 11)]
        for _ in range(50):
            await asyncio.sleep(0)
    assert [len((await each).slots) for each in waiting] == [1, 1]
    assert a.used(rig.cache.tiers.shared) == 4
    assert rig.cache.tiers.counters[rig.cache.tiers.shared.level].evicted == 4


async def test_room_that_comes_while_own_blocks_are_looked_for_is_taken_and_no_block_goes(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    a = Home(rig, "a", {CPU: (0, 4)})
    await a.put([1, 2, 3])
    given = await a.reserve([4])
    looks = 0

    async def meanwhile(*arguments: Any, limits: Limits, **named: Any) -> Any:
        def limits_now() -> Losses | None:
            nonlocal looks
            looks += 1
            if looks == 2:  # all blocks have been looked at, and none is chosen yet
                a.release(given)
            return limits()

        return await find_victims(*arguments, limits=limits_now, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("prefixd.cache.moving.room.find_victims", meanwhile)
        async with asyncio.timeout(20):
            assert len((await a.reserve([5])).slots) == 1
    assert (looks, a.has([1, 2, 3], CPU)) == (2, 3)


async def test_where_all_is_guaranteed_only_own_blocks_go(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=6, disk=12)
    a, b = Home(rig, "a", {CPU: (3, None), DISK: (6, None)}), Home(rig, "b", {CPU: (3, None), DISK: (6, None)})
    for prompt in ([1, 2, 3], [4, 5, 6], [7, 8]):
        for home in (a, b):
            await home.put(prompt, durable=True)
    assert [home.used(tier) for home in (a, b) for tier in (rig.cache.tiers.shared, rig.durable)] == [3, 6, 3, 6]


async def test_who_is_within_its_guarantee_keeps_its_own_while_others_have_more(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    a, b = Home(rig, "a", {CPU: (4, None)}), Home(rig, "b", {CPU: (2, None)})
    await a.put([1, 2])  # the oldest of all
    await b.put([1, 2, 3, 4, 5, 6])
    await a.put([3, 4])
    assert (a.has([1, 2], CPU), a.has([3, 4], CPU), b.used(rig.cache.tiers.shared)) == (2, 2, 4)
    await a.put([5])
    assert (a.has([1, 2], CPU), a.has([5], CPU)) == (2, 1), "it may have more than that, as long as others do"
    await a.put([6])
    assert (a.used(rig.cache.tiers.shared), a.has([1, 2], CPU)) == (5, 1), "beyond it, its oldest block goes"


async def test_on_disk_a_guarantee_holds_for_single_blocks_and_for_writes_that_wait(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=4)
    a, b = Home(rig, "a", {DISK: (3, None)}), Home(rig, "b")
    await a.put([1, 2, 3], durable=True)
    assert await b.put([1], durable=True) == (1, 0)
    assert await b.put([2], durable=True) == (1, 0)
    others = r"tenant b: .* 12288 bytes of it are pinned by, or guaranteed to, others .*tenants\.b\.disk_guaranteed"
    with pytest.raises(ExhaustedError, match=others + ".* unpin prefixes of others, lower their guarantees"):
        await b.put([3, 4], durable=True)
    assert b.tenant.refused == {"disk_guaranteed": 1}
    assert (a.has([1, 2, 3], DISK), b.used(rig.durable)) == (3, 1)


async def test_a_durable_store_that_pins_of_others_stop_names_them(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=4)
    a, b = Home(rig, "a"), Home(rig, "b")
    await b.put([1, 2, 3], durable=True)
    await rig.cache.pins.pin(rig.cache.trie(b.namespace), np.array(rig.rows([1, 2, 3], b.namespace)))
    a.limit({DISK: (2, None)})
    others = r"tenant a: 2 blocks .* but 1 .* 12288 bytes of it are pinned by, .*8192 guaranteed to a"
    with pytest.raises(ExhaustedError, match=others):
        await a.put([1, 2], durable=True)
    assert a.tenant.refused == {"disk_guaranteed": 1}


async def test_a_durable_store_says_only_of_what_is_cached_that_it_is(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, disk=8)
    a = Home(rig, "a", {CPU: (0, 4), DISK: (0, 2)})
    assert await a.put(range(6)) == (4, 0)
    with pytest.raises(ExhaustedError, match=r"4 blocks of the prompt are cached, but 2 .*tenants\.a\.disk_most"):
        await rig.cache.persist(a.namespace, rig.chain(range(6), a.namespace))


async def test_in_the_gpu_tier_cached_blocks_within_a_guarantee_stay(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=6, cpu=8)
    a, b = Home(rig, "a", {GPU: (3, None)}), Home(rig, "b")
    await gpu_blocks(rig, a, [1, 2, 3, 4])
    assert await rig.cache.mover.slots.take_frames(4, tenant=b.tenant) is None
    assert a.has([1, 2, 3, 4], GPU) == 4, "an estimate that fails costs nobody a block"
    frames = await rig.cache.mover.slots.take_frames(3, tenant=b.tenant)
    assert frames is not None and a.has([1, 2, 3, 4], GPU) == 3
    rig.cache.tiers.compute.free(frames)


async def test_who_goes_down_makes_room_at_the_cost_of_its_own_tenant(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=2, cpu=4)
    a, b = Home(rig, "a", {CPU: (2, None)}), Home(rig, "b")
    await a.put([1, 2])
    await b.put([1, 2])
    await gpu_blocks(rig, b, [5, 6])
    await gpu_blocks(rig, b, [7, 8])
    assert (a.has([1, 2], CPU), b.has([5, 6], CPU), b.has([1, 2], CPU)) == (2, 2, 0)


@pytest.mark.parametrize("large_first", [True, False])
async def test_a_page_with_a_protected_slot_stays(make_rig: MakeRig, large_first: bool) -> None:
    rig = make_rig(cpu=1024)
    large = Home(rig, "large", {CPU: (512 if large_first else 0, None)}, nbytes=32 * 4096)
    small = Home(rig, "small", {CPU: (0 if large_first else 512, None)})
    first, second = (large, small) if large_first else (small, large)
    sizes = {large: 32, small: 1}
    for home in (first, second):
        for number in range(1024 // sizes[home] // 8 + 8):
            with_room = await home.put(range(number * 100, number * 100 + 8))
            assert with_room[0] > 0
        if home is first:
            assert home.used(rig.cache.tiers.shared) > 900
    assert first.used(rig.cache.tiers.shared) >= 512
    assert second.used(rig.cache.tiers.shared) > 256, "whole pages went as far as nobody was protected there"
    rig.check()


async def test_what_nobody_uses_of_a_guarantee_can_be_used_until_it_is_wanted(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    a, b, c = Home(rig, "a", {CPU: (4, None)}), Home(rig, "b", {CPU: (2, None)}), Home(rig, "c")
    for number in range(8):
        await c.put([number])
    assert c.used(rig.cache.tiers.shared) == 8
    assert await a.put([1, 2, 3, 4]) == (4, 0)
    assert await b.put([1, 2]) == (2, 0)
    for number in range(8):
        await c.put([number])
    assert [home.used(rig.cache.tiers.shared) for home in (a, b, c)] == [4, 2, 2]


# -- what is held --------------------------------------------------------------------------------------------------


async def test_leases_leave_others_what_they_are_guaranteed(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    a, b = Home(rig, "a", {CPU: (4, None)}), Home(rig, "b")
    await b.put([1, 2, 3, 4, 5, 6, 7, 8])
    lease, again = await b.lease([1, 2, 3, 4, 5, 6, 7, 8]), await b.lease([1, 2, 3])
    assert lease is not None and len(lease.rows) == 4, "shorter, so that the other four can go"
    assert again is not None and b.held(rig.cache.tiers.shared) == 4, "what is leased twice is held once"
    with pytest.raises(ExhaustedError, match=r"tenant b: .*holds 16384 bytes.*tenants\.b\.cpu_guaranteed"):
        await b.reserve([9])
    assert await a.put([1, 2, 3, 4]) == (4, 0)
    assert a.used(rig.cache.tiers.shared) == 4
    b.release(lease)
    b.release(again)
    assert b.held(rig.cache.tiers.shared) == 0
    lease = await b.lease([1, 2])
    assert lease is not None
    assert len((await b.reserve([30, 31, 32, 33])).slots) == 4 - len(lease.rows), "reservations and leases together"


async def test_what_several_hold_together_leaves_others_their_guarantees(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    a, b, c = Home(rig, "a", {CPU: (4, None)}), Home(rig, "b", {CPU: (1, None)}), Home(rig, "c")
    assert len((await c.reserve(range(8))).slots) == 3
    assert len((await b.reserve(range(8))).slots) == 1, "its own guarantee, and nothing of what c holds"
    assert len((await a.reserve(range(8))).slots) == 4
    with pytest.raises(ExhaustedError):
        await a.reserve([9])


async def test_blocks_before_a_reservation_are_held_where_there_is_no_tier_below(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    a, b = Home(rig, "a", {CPU: (4, None)}), Home(rig, "b")
    await b.put([1, 2, 3])
    given = await b.reserve([1, 2, 3, 4, 5])
    assert (len(given.slots), b.held(rig.cache.tiers.shared)) == (1, 4)
    assert await a.put([1, 2, 3, 4]) == (4, 0)


async def test_pins_leave_others_what_they_are_guaranteed(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8)
    a, b = Home(rig, "a", {CPU: (4, None)}), Home(rig, "b")
    await b.put([1, 2, 3])
    await b.put([4, 5, 6])
    trie, pins = rig.cache.trie(b.namespace), rig.cache.pins
    first, second = (np.array(rig.rows(prompt, b.namespace)) for prompt in ([1, 2, 3], [4, 5, 6]))
    await pins.pin(trie, first)
    assert b.held(rig.cache.tiers.shared) == 3
    with pytest.raises(ExhaustedError, match=r"tenants\.b\.cpu_guaranteed.*unpin|unpin.*"):
        await pins.pin(trie, second)
    assert not trie.pinned[second].any()
    assert await a.put([1, 2, 3, 4]) == (4, 0)
    await pins.unpin(trie, first)
    assert b.held(rig.cache.tiers.shared) == 0


async def test_one_session_may_reserve_half_of_the_tier(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, reserved_bytes=None)
    rig.session.processes.add(process := Process(1))
    given = await rig.cache.reserve(rig.session, rig.namespace, rig.chain(range(8)))
    assert not isinstance(given, int) and len(given.slots) == 4
    with rig.nothing_lost(), pytest.raises(ExhaustedError, match=r"transfers\.reserved_bytes"):
        await rig.cache.reserve(rig.session, rig.namespace, rig.chain([9]))
    assert rig.cache.tenants.default.refused == {"reserved_bytes": 1}
    other = rig.open_session()
    assert not isinstance(await rig.cache.reserve(other, rig.namespace, rig.chain([9])), int)
    rig.cache.leases.close(rig.session)
    assert len(rig.cache.quarantine)
    rig.session = rig.open_session()
    rig.session.processes.add(process)
    with pytest.raises(ExhaustedError, match=r"transfers\.reserved_bytes"):
        await rig.cache.reserve(rig.session, rig.namespace, rig.chain([10]))
    rig.cache.process_ended(process)
    rig.session = rig.open_session()
    assert await rig.put([10]) == (1, 0)


# -- accounting ----------------------------------------------------------------------------------------------------


async def test_what_came_back_from_disk_is_counted(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=8)
    await rig.put([1, 2, 3], durable=True)
    await rig.restart()
    assert rig.cache.mover.use.used_bytes(rig.cache.tenants.default, rig.durable) == 3 * rig.part_bytes
    rig.check()


async def test_places_that_a_store_names_again_are_counted_once(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, disk=8)
    await rig.put([1, 2], durable=True)
    rows = np.array(rig.rows([1, 2]))
    rig.cache.placement.put(rig.trie, rows, rig.durable, rig.trie.slots[rows, DISK].copy())
    rig.check()


async def test_a_trie_that_gets_another_geometry_is_counted_by_that(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=16)
    old = Home(rig, "a", nbytes=3 * 4096)
    await old.put([1, 2])
    old.release(await old.lease([1, 2]))
    trie = rig.cache.trie(old.namespace)
    await forget_blocks(rig.cache.mover, trie, rig.rows([1, 2], old.namespace)[::-1])
    rig.cache.leases.close(old.session)
    del old
    parts = (PartSpec("kv", 0, 4096), PartSpec("window", 0, 8192, SlidingWindow(3)))
    namespace = rig.cache.register(NamespaceSpec("another", 2, parts, tenant="a"))
    assert rig.cache.trie(namespace) is trie
    rig.session = rig.cache.leases.open("a", 1, 0.0, rig.cache.tenants.known("a"))
    assert await rig.put([1, 2, 3], namespace=namespace) == (3, 0)
    lease = await rig.lease([1, 2, 3], namespace=namespace)
    use, shared, tenant = rig.cache.mover.use, rig.cache.tiers.shared, rig.cache.tenants.known("a")
    assert use.used_bytes(tenant, shared) == 9 * 4096
    assert use.held_bytes(tenant, shared) == 5 * 4096, "the window needs one block of three"
    rig.check()
    assert lease is not None
    rig.cache.release(rig.session, lease.id)


async def gpu_blocks(rig: Rig, home: Home, prompt: Sequence[int]) -> None:
    """Has the worker compute a prompt's blocks, of which nobody keeps anything."""
    chain, cache = rig.chain(prompt, home.namespace), rig.cache
    rig.clock.now += 1
    frames = await cache.mover.slots.take_frames(len(prompt), tenant=home.tenant)
    assert frames is not None
    for block, frame in enumerate(frames):
        await rig.upload(rig.frame(frame), rig.content(home.namespace, chain, block))
    _, taken = cache.record(home.namespace, home.namespace.root, chain, 0, frames)
    assert taken.all()


def test_what_is_wanted_is_lost_once_however_many_tables_there_are() -> None:
    use = SimpleNamespace(
        owners=lambda trie, rows: np.zeros(len(rows), np.int64),
        bytes_of_groups=lambda trie, rows, groups, tier: np.where(groups, 10, 0),
    )
    unlimited = np.array([1 << 40, -1])
    losses = Losses(cast(Any, use), cast(Any, None), unlimited, wanted=25)
    rows, groups = np.arange(2), np.ones(2, np.uint8)
    assert losses.first(cast(Any, None), rows, groups).tolist() == [True, True]
    assert losses.first(cast(Any, None), rows, groups).tolist() == [True, False], "20 of 25 bytes were lost before"
