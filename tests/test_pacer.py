from __future__ import annotations

import asyncio

import pytest

from prefixd import pacer
from prefixd.pacer import Pacer, give_way


async def test_others_run_after_a_slice_of_work() -> None:
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


async def test_long_work_of_several_pauses_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacer, "_WORK_S", 0.0)  # a pause after each slice
    monkeypatch.setattr(pacer, "_PAUSE_S", 0.02)
    monkeypatch.setattr(pacer, "_QUIET_S", 60.0)
    slices = 0

    async def work() -> None:
        nonlocal slices
        while True:
            slices += 1
            await give_way()

    await give_way()  # from here on work is under way
    workers = [asyncio.create_task(work()) for _ in range(3)]
    turns = 0
    await asyncio.sleep(0)
    begun = slices
    while slices == begun:  # turns that others have in one pause
        turns += 1
        await asyncio.sleep(0)
    assert turns > 10
    assert begun == 3
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    await asyncio.wait_for(give_way(), 10)  # a gate that nobody waits for opens all the same


async def test_short_work_does_not_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacer, "_WORK_S", 30.0)
    monkeypatch.setattr(pacer, "_PAUSE_S", 60.0)
    monkeypatch.setattr(pacer, "_QUIET_S", 60.0)
    for _ in range(100):
        await asyncio.wait_for(give_way(), 10)


async def test_a_pause_goes_on_while_calls_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacer, "_WORK_S", 0.0)
    monkeypatch.setattr(pacer, "_PAUSE_S", 0.001)
    monkeypatch.setattr(pacer, "_LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr(pacer, "_QUIET_S", 60.0)
    loop = asyncio.get_running_loop()

    async def calls() -> None:
        while True:
            pacer.call_arrived()
            await asyncio.sleep(0)

    await give_way()  # from here on work is under way
    caller = asyncio.create_task(calls())
    begin_s = loop.time()
    await asyncio.wait_for(give_way(), 10)  # not for ever
    assert loop.time() - begin_s >= 0.2
    caller.cancel()
