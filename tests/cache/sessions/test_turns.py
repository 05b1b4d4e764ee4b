"""Work on the event loop is divided by what it costs: by parts and by wishes, not by blocks alone."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from prefixd.base.errors import InvalidArgumentError
from prefixd.cache import Reservation
from prefixd.cache.placement.holds import Hold, Holds
from prefixd.cache.placement.retention import Retention, RetentionGrant
from prefixd.cache.sessions import reservations
from prefixd.cache.sessions.reservations import Reservations
from tests.rig import MakeRig


async def test_blocks_of_many_parts_are_entered_fewer_at_a_time(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "_COMMIT_PARTS", 12)
    rig = make_rig(cpu=40)
    wide = rig.register("wide", parts=4, nbytes=8)
    entered: list[int] = []
    enter = Reservations._enter

    def noted(self: Reservations, reservation: Reservation, before: Any, start: int, end: int) -> Any:
        entered.append(end - start)
        return enter(self, reservation, before, start, end)

    monkeypatch.setattr(Reservations, "_enter", noted)
    assert await rig.put(range(8), namespace=wide) == (8, 0)
    assert entered == [3, 3, 2]
    assert await rig.get(range(8), namespace=wide) == 8


async def test_slots_of_many_parts_are_allocated_fewer_at_a_time(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd.cache.moving.allocation._ALLOCATED_AT_ONCE", 8)
    rig = make_rig(cpu=40)
    wide = rig.register("wide", parts=4, nbytes=8)
    allocate, asked = rig.cache.tiers.shared.allocate, []

    def noted(sizes: Any, blocks: int, *more: Any) -> Any:
        asked.append(blocks)
        return allocate(sizes, blocks, *more)

    monkeypatch.setattr(rig.cache.tiers.shared, "allocate", noted)
    assert await rig.put(range(5), namespace=wide) == (5, 0)
    assert asked == [2, 2, 1]


async def test_many_leased_blocks_are_held_in_one_turn_and_counted_in_another(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(cpu=8)
    await rig.put(range(5))
    turns: list[str] = []
    hold, count = Holds.hold, Hold.count_in

    def held(*args: Any, **how: Any) -> Hold:
        asyncio.get_running_loop().call_soon(turns.append, "another task")
        turns.append("hold")
        return hold(*args, **how)

    def counted(*args: Any) -> None:
        turns.append("count")
        count(*args)

    monkeypatch.setattr(Holds, "hold", held)
    monkeypatch.setattr(Hold, "count_in", counted)
    for at_once, expected in ((5, ["hold"]), (4, ["hold", "another task", "count"])):
        await asyncio.sleep(0)
        turns.clear()
        monkeypatch.setattr("prefixd.cache.sessions.leasing._HELD_AT_ONCE", at_once)
        lease = await rig.lease(range(5))
        assert turns[: len(expected)] == expected
        assert ("count" in turns) == ("count" in expected)
        assert lease is not None
        assert len(lease.hold.rows) == 5
        rig.cache.release(rig.session, lease.id)


async def test_many_wishes_are_applied_to_fewer_blocks_at_a_time(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd.cache.placement.retention._AT_ONCE", 8)
    monkeypatch.setattr("prefixd.cache.placement.retention._LEAST_AT_ONCE", 2)
    rig = make_rig(cpu=16)
    await rig.put(range(7))
    applied: list[int] = []
    apply = RetentionGrant.apply

    def noted(self: RetentionGrant, rows: Any, first_block: int) -> None:
        applied.append(len(rows))
        apply(self, rows, first_block)

    monkeypatch.setattr(RetentionGrant, "apply", noted)
    chain = rig.chain(range(7))
    for wishes, steps in ((1, [7]), (2, [4, 3]), (50, [2, 2, 2, 1])):
        applied.clear()
        assert await rig.cache.retain(rig.namespace, chain, [Retention(priority=1)] * wishes) == 7
        assert applied == steps


def test_a_list_of_parts_is_not_read_when_it_is_too_long(make_rig: MakeRig) -> None:
    class Unread(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("it is read")

    rig = make_rig()
    with pytest.raises(InvalidArgumentError, match="parts has 9 numbers; the namespace has 1 parts, name each once"):
        rig.namespace.check_parts(Unread(np.zeros(9, np.int64)))
