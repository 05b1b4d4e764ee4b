from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prefixd.base.long_work import pacer
from prefixd.base.long_work.pacer import Pacer, give_way
from prefixd.planner.simulation.event_loop import SimulatedTimeLoop

WORK_S = 0.002
SLICE_S = 0.003  # longer, so that there is a pause after each
TURN_S = 0.001


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacer, "_WORK_S", WORK_S)
    monkeypatch.setattr(pacer, "_PAUSE_S", 0.01)
    monkeypatch.setattr(pacer, "_LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(pacer, "_QUIET_S", 60.0)


@asynccontextmanager
async def workers(number: int) -> AsyncIterator[list[int]]:
    """Long work, in simulated time; its slices so far, by worker."""
    slices = [0] * number
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedTimeLoop)

    async def work(at: int) -> None:
        while True:
            slices[at] += 1
            loop._time_selector.now_s += SLICE_S
            await give_way()

    await give_way()  # from here on work is under way
    tasks = [asyncio.create_task(work(at)) for at in range(number)]
    yield slices
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_others_run_after_a_slice_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacer, "_WORK_S", 60.0)
    turns: list[int] = []

    async def other() -> None:
        for turn in range(3):
            turns.append(turn)
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    paced = Pacer(800)
    for _ in range(3):
        await paced.worked(200)
    assert not turns
    await paced.worked(200)
    assert turns == [0]
    await paced.worked(5000)
    assert turns == [0, 1]
    await paced.worked(799)
    assert turns == [0, 1]
    await task


@pytest.mark.usefixtures("pauses")
@pytest.mark.parametrize("number", [1, 4, 16])
def test_however_many_do_long_work_others_have_turns_after_each_slice(number: int) -> None:
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        runner.run(_others_have_turns_after_each_slice(number))


async def _others_have_turns_after_each_slice(number: int) -> None:
    async with workers(number) as slices:
        await asyncio.sleep(0)
        assert sum(slices) == number, "each has begun"
        turns, at_once = 0, []
        deadline = asyncio.get_running_loop().time() + 30
        while min(slices) < 3 and asyncio.get_running_loop().time() < deadline:
            before = sum(slices)
            await asyncio.sleep(TURN_S)
            if sum(slices) == before:
                turns += 1
                continue
            at_once.append((sum(slices) - before, turns))
            turns = 0
        assert min(slices) >= 3, "everybody has his turn"
        assert max(count for count, _ in at_once) == 1
        assert min(turns for _, turns in at_once[1:]) > 5
    await asyncio.wait_for(give_way(), 10)  # a gate that nobody waits for opens all the same


@pytest.mark.usefixtures("pauses")
async def test_a_pause_goes_on_while_calls_arrive_but_not_for_ever() -> None:
    async def calls() -> None:
        while True:
            pacer.call_arrived()
            await asyncio.sleep(0)

    await give_way()  # from here on work is under way
    caller = asyncio.create_task(calls())
    time.sleep(SLICE_S)
    begin_s = time.monotonic()
    await asyncio.wait_for(give_way(), 10)
    assert time.monotonic() - begin_s >= 0.1
    caller.cancel()


async def test_short_work_does_not_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacer, "_WORK_S", 30.0)
    monkeypatch.setattr(pacer, "_PAUSE_S", 60.0)
    monkeypatch.setattr(pacer, "_QUIET_S", 60.0)
    for _ in range(100):
        await asyncio.wait_for(give_way(), 10)


async def test_work_that_begins_after_a_quiet_time_does_not_pause_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacer, "_WORK_S", 0.0)
    monkeypatch.setattr(pacer, "_PAUSE_S", 60.0)
    monkeypatch.setattr(pacer, "_QUIET_S", 0.01)
    for _ in range(3):
        await asyncio.sleep(0.02)
        await asyncio.wait_for(give_way(), 10)
