"""The lock that orders changes of the store: the most urgent is next, and its holder is as urgent as whoever waits."""

from __future__ import annotations

import asyncio

import pytest

from prefixd.cache.placement.movement import Movement, UrgentLock
from prefixd_swap.transfers import Urgency

DEMAND, PREFETCH, WRITE_BACK, SCRUB = Urgency


class Ward:
    """Movements that have the lock one after the other, each until it is told to let go."""

    def __init__(self, *, urgency: bool = True) -> None:
        self.lock = UrgentLock(urgency_enabled=urgency)
        self.order: list[str] = []
        self.let_go = asyncio.Event()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, movement: Movement) -> None:
        async def hold() -> None:
            async with self.lock.hold(movement):
                self.order.append(name)
                await self.let_go.wait()

        self.tasks[name] = asyncio.create_task(hold())
        await asyncio.sleep(0)

    async def end(self) -> list[str]:
        self.let_go.set()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert not self.lock.locked()
        return self.order


async def test_the_most_urgent_is_next_and_of_equals_the_first() -> None:
    ward = Ward()
    for name, urgency in (("a", SCRUB), ("b", WRITE_BACK), ("c", DEMAND), ("d", PREFETCH), ("e", DEMAND)):
        await ward.come(name, Movement(urgency))
    assert await ward.end() == ["a", "c", "e", "d", "b"]


async def test_without_urgency_who_came_first_is_next() -> None:
    ward, first = Ward(urgency=False), Movement(WRITE_BACK)
    for name, movement in (("a", first), ("b", Movement(WRITE_BACK)), ("c", Movement(DEMAND))):
        await ward.come(name, movement)
    assert first.urgency is WRITE_BACK
    assert await ward.end() == ["a", "b", "c"]


async def test_the_holder_is_as_urgent_as_who_waits_until_it_lets_go() -> None:
    ward, first, second = Ward(), Movement(WRITE_BACK), Movement(SCRUB)
    await ward.come("first", first)
    await ward.come("second", second)
    assert first.urgency is WRITE_BACK, "who waits is not more urgent"
    await ward.come("third", Movement(DEMAND))
    assert first.urgency is DEMAND and second.urgency is SCRUB
    assert await ward.end() == ["first", "third", "second"]
    assert first.urgency is WRITE_BACK, "what it moves later is as urgent as before"


async def test_who_becomes_more_urgent_while_he_waits_comes_earlier() -> None:
    ward, late = Ward(), Movement(SCRUB)
    for name, movement in (("a", Movement(DEMAND)), ("b", Movement(WRITE_BACK)), ("c", late)):
        await ward.come(name, movement)
    late.raise_to(DEMAND)
    assert await ward.end() == ["a", "c", "b"]


@pytest.mark.parametrize("handed_over", [False, True])
async def test_a_waiter_that_is_cancelled_keeps_nobody_waiting(handed_over: bool) -> None:
    ward = Ward()
    for name in "abc":
        await ward.come(name, Movement(WRITE_BACK))
    if handed_over:
        ward.let_go.set()
        while ward.lock._waiting and ward.lock._waiting[0][0] is not None and not ward.tasks["a"].done():
            await asyncio.sleep(0)  # until the lock is b's, which has not run yet
    ward.tasks["b"].cancel()
    assert [name for name in await ward.end() if name != "b"] == ["a", "c"]
