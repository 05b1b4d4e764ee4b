"""Work in steps comes to the same whichever way it is done, and says when there is no thread for it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from prefixd.base.errors import ExhaustedError
from prefixd.base.long_work import steps
from prefixd.base.long_work.steps import Steps, do_at_once, do_in_slices, in_thread


def counting(threads: list[int]) -> Steps[int]:
    total = 0
    for number in range(3):
        yield None
        total += yield lambda number=number: threads.append(threading.get_ident()) or number  # type: ignore[misc]
    return total


async def test_both_ways_come_to_the_same() -> None:
    here: list[int] = []
    elsewhere: list[int] = []
    assert do_at_once(counting(here)) == await do_in_slices(counting(elsewhere)) == 3
    assert set(here) == {threading.get_ident()} and threading.get_ident() not in elsewhere


async def test_others_run_between_steps() -> None:
    turns = 0

    def many() -> Steps[None]:
        for _ in range(10):
            yield None

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await do_in_slices(many())
    task.cancel()
    assert turns >= 10


async def test_a_cancelled_work_is_closed() -> None:
    closed = []

    def endless() -> Steps[None]:
        try:
            while True:
                yield None
        finally:
            closed.append(True)

    task = asyncio.create_task(do_in_slices(endless()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == [True]


async def test_a_shortage_of_threads_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(message: str) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(steps.asyncio, "to_thread", lambda work: refuse("can't start new thread"))
    with pytest.raises(ExhaustedError, match="ulimit -u"):
        await in_thread(lambda: None)
    monkeypatch.setattr(steps.asyncio, "to_thread", lambda work: refuse("something else"))
    with pytest.raises(RuntimeError, match="something else"):
        await in_thread(lambda: None)
