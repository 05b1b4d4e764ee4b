"""The journal of evictions finds the last removal of a block, and remembers a bounded number of them."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from prefixd.observability import eviction_journal
from prefixd.observability.actor import acting
from prefixd.observability.eviction_journal import Cause, EvictionJournal, Reason, because


def keys(*numbers: int) -> npt.NDArray[np.uint8]:
    """Keys of which each two differ in their first or in their second half only."""
    halves = np.array([[number // 2, number % 2] for number in numbers], np.uint64).reshape(-1, 2)
    return halves.view(np.uint8).reshape(-1, 16)


async def test_a_block_is_found_with_its_cause() -> None:
    journal = EvictionJournal(kept=100)
    with acting("r7"), because(Reason.ROOM, "b"):
        journal.enter(keys(1, 2, 3), 1, 10.0)
    journal.enter(keys(2), 2, 20.0)
    one, two, three, four = await journal.find(keys(1, 2, 3, 4), 100.0)
    assert one == three and one is not None and four is None
    assert (one.at_s, one.tier, one.cause) == (10.0, 1, Cause(Reason.ROOM, "b", "r7"))
    assert two is not None and (two.at_s, two.tier, two.cause) == (20.0, 2, Cause())
    (early,) = await journal.find(keys(2), 15.0)
    assert early == one, "a removal after that time does not count"


async def test_a_block_that_comes_and_goes_is_looked_at_once_a_slice() -> None:
    journal, places = EvictionJournal(kept=1000), list[int]()
    for time_s in range(250):
        journal.enter(keys(1, 2, 3, 4), 1, float(time_s))

    class Counted(np.ndarray[Any, Any]):
        def __getitem__(self, place: Any) -> Any:
            if isinstance(place, int):
                places.append(place)
            return super().__getitem__(place)

    journal._keys = journal._keys.view(Counted)
    for before_s, found_s in ((1000.0, 249.0), (100.5, 100.0), (-1.0, None)):
        removals = await journal.find(keys(1, 2), before_s)
        assert [None if each is None else each.at_s for each in removals] == [found_s] * 2
    assert len(places) == 4


async def test_room_further_down_is_for_the_same_tenant() -> None:
    journal = EvictionJournal(kept=100)
    with because(Reason.ROOM, "b"), because(Reason.ROOM, "a"):
        journal.enter(keys(1), 1, 10.0)
    with because(Reason.ROOM, "b"), because(Reason.DAMAGED):
        journal.enter(keys(2), 2, 10.0)
    with because(Reason.RESIZE), because(Reason.ROOM, "a"):
        journal.enter(keys(3), 1, 10.0)
    first, second, third = await journal.find(keys(1, 2, 3), 100.0)
    assert first is not None and first.cause == Cause(Reason.ROOM, "b")
    assert second is not None and second.cause == Cause(Reason.DAMAGED)
    assert third is not None and third.cause == Cause(Reason.RESIZE), "a tier shrinks for nobody"


async def test_a_task_has_the_cause_of_where_it_began() -> None:
    journal = EvictionJournal(kept=100)

    async def remove() -> None:
        await asyncio.sleep(0)
        journal.enter(keys(1), 1, 10.0)

    with acting("write-back"), because(Reason.QUOTA, "a"):
        task = asyncio.create_task(remove())
    await task
    (found,) = await journal.find(keys(1), 100.0)
    assert found is not None and found.cause == Cause(Reason.QUOTA, "a", "write-back")


async def test_without_room_for_blocks_nothing_is_remembered() -> None:
    journal = EvictionJournal(kept=0)
    journal.enter(keys(1), 1, 10.0)
    assert len(journal) == 0 and await journal.find(keys(1), 100.0) == [None]


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=40, unique=True), max_size=30),
    st.integers(1, 50),
    st.integers(1, 30),
    st.integers(-1, 30),
)
def test_the_last_removal_that_is_remembered_is_found(
    removals: list[list[int]], kept: int, remembered: int, before_s: int
) -> None:
    journal = EvictionJournal(kept)
    journal._removals = type(journal._removals)(maxlen=remembered)
    scanned, eviction_journal._SCANNED_AT_ONCE = eviction_journal._SCANNED_AT_ONCE, 7
    try:
        entries = []
        for number, some in enumerate(removals):
            journal.enter(keys(*some), 1, float(number))
            entries += [(block, number) for block in some]
        counted = [number for number, some in enumerate(removals) if some][-remembered:]
        last = {block: number for block, number in entries[-kept:] if number in counted and number <= before_s}
        found = asyncio.run(journal.find(keys(*range(31)), float(before_s)))
        assert {block: removal.at_s for block, removal in enumerate(found) if removal is not None} == last
        assert len(journal) == min(len(entries), kept)
    finally:
        eviction_journal._SCANNED_AT_ONCE = scanned
