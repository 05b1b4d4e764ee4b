"""Work on the event loop is divided by what it costs: by parts and by wishes, not by blocks alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from prefixd.base.errors import InvalidArgumentError
from prefixd.cache import Reservation
from prefixd.cache.placement.retention import Retention, Wish
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


async def test_many_wishes_are_applied_to_fewer_blocks_at_a_time(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd.cache.placement.retention._AT_ONCE", 8)
    monkeypatch.setattr("prefixd.cache.placement.retention._LEAST_AT_ONCE", 2)
    rig = make_rig(cpu=16)
    await rig.put(range(7))
    applied: list[int] = []
    apply = Wish.apply

    def noted(self: Wish, rows: Any, first_block: int) -> None:
        applied.append(len(rows))
        apply(self, rows, first_block)

    monkeypatch.setattr(Wish, "apply", noted)
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
