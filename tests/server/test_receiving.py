"""When the messages of calls may be received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prefixd.errors import ExhaustedError, TooSlowError
from prefixd.server import receiving
from prefixd.server.caller import Caller
from prefixd.server.receiving import (
    Receiving,
    first_message,
    later_message,
    message_bytes,
    set_door,
    set_message_bytes,
)
from prefixd.tenants import Quota, Role, Tenants
from prefixd_swap.simulated_time import SimulatedTimeLoop

_LARGE = 16 << 20


class Calls:
    """Calls of tenants whose messages arrive when a test says.

    A call's name is its tenant's letter, or `-` for the default one, its caller's, and a number.
    """

    def __init__(self, *tenants: str) -> None:
        self.tenants = Tenants(dict.fromkeys(tenants, Quota()))
        self._receiving = Receiving(self.tenants)
        self._arrive: dict[str, asyncio.Future[int]] = {}
        self.receiving: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def send(self, *names: str, role: Role = Role.CLIENT) -> None:
        for name in names:
            self._arrive[name] = asyncio.get_running_loop().create_future()
            self.tasks[name] = asyncio.create_task(self._call(name, role))

    def arrive(self, name: str, nbytes: int = 100) -> None:
        self._arrive[name].set_result(nbytes)

    async def _call(self, name: str, role: Role) -> None:
        tenant = self.tenants.get(name[0]) or self.tenants.default
        async with self._receiving.turn(Caller(tenant, role, name[:2], "tcp")):
            self.receiving.append(name)
            try:
                set_message_bytes(await self._arrive[name])
            finally:
                self.receiving.remove(name)


async def turns(count: int = 8) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def simulate(work: Coroutine[Any, Any, None]) -> None:
    """Runs it in a time that does not pass while it computes."""
    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        runner.run(work)


@asynccontextmanager
async def ended(calls: Calls) -> AsyncIterator[None]:
    """All calls end in it."""
    yield
    for task in calls.tasks.values():
        task.cancel()
    await asyncio.gather(*calls.tasks.values(), return_exceptions=True)


async def test_so_many_messages_of_a_caller_and_of_a_tenant_are_on_their_way() -> None:
    calls = Calls()
    async with ended(calls):
        calls.send(*(f"-x{number}" for number in range(receiving.AT_ONCE_OF_CALLER + 2)))
        await turns()
        assert len(calls.receiving) == receiving.AT_ONCE_OF_CALLER
        calls.arrive("-x1", _LARGE)
        calls.tasks["-x0"].cancel()
        await turns()
        assert len(calls.receiving) == receiving.AT_ONCE_OF_CALLER and {"-x4", "-x5"} < set(calls.receiving)
        for caller in "abcdef":
            calls.send(*(f"-{caller}{number}" for number in range(receiving.AT_ONCE_OF_CALLER)))
        await turns()
        assert len(calls.receiving) == receiving.AT_ONCE
        calls.send("-o1", role=Role.ADMIN)
        await turns()
        assert "-o1" in calls.receiving, "operators do not wait"


async def test_calls_whose_message_is_not_here_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "OPENING", 12)
    calls = Calls("a", "b")
    async with ended(calls):
        calls.send(*(f"a{number}" for number in range(9)))
        await turns()
        refused = [name for name, task in calls.tasks.items() if task.done()]
        assert refused == ["a8"], "two are kept for each of the others"
        with pytest.raises(ExhaustedError, match="tenant a: the messages of 8 calls are on their way"):
            await calls.tasks["a8"]
        calls.send("b1", "b2", "b3")
        await turns()
        assert [calls.tasks[name].done() for name in ("b1", "b2", "b3")] == [False, False, True]
        with pytest.raises(ExhaustedError):
            await calls.tasks["b3"]
        assert calls.tenants.known("a").refused["opening"] == 1


async def test_between_tenants_one_comes_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "_SOON_S", 60.0)
    calls = Calls("a", "b")
    async with ended(calls):
        calls.send("a1", "a2", "a3", "b1")
        await turns()
        assert calls.receiving == ["a1", "b1"]
        calls.arrive("a1")
        await turns()
        assert calls.receiving == ["b1", "a2"]
        calls.tasks["a2"].cancel()
        await turns()
        assert calls.receiving == ["b1", "a3"]


def test_after_a_large_one_the_next_of_its_tenant_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "BYTES_PER_S", 4 * _LARGE)

    async def work() -> None:
        calls = Calls("a", "b")
        async with ended(calls):
            calls.send("a1", "a2", "b1")
            await turns()
            begin_s = asyncio.get_running_loop().time()
            calls.arrive("a1", _LARGE)
            calls.arrive("b1")
            calls.send("b2")
            await turns()
            assert calls.receiving == ["b2"], "nobody else waits"
            while "a2" not in calls.receiving:
                await asyncio.sleep(0.005)
            assert 0.25 <= asyncio.get_running_loop().time() - begin_s < 0.26

    simulate(work())


def test_one_that_does_not_come_keeps_the_next_for_a_moment() -> None:
    async def work() -> None:
        calls = Calls("a")
        async with ended(calls):
            calls.send("a1", "a2")
            await turns()
            assert calls.receiving == ["a1"]
            while calls.receiving != ["a1", "a2"]:
                await asyncio.sleep(0.005)
            assert asyncio.get_running_loop().time() < 0.04

    simulate(work())


async def test_all_processes_of_a_user_and_all_calls_from_a_host_are_one_caller() -> None:
    tenants = Tenants()
    receiving_ = Receiving(tenants)

    def caller(name: str, pid: int = 0, host: str = "") -> Caller:
        return Caller(tenants.default, Role.CLIENT, name, "unix" if pid else "tcp", pid, host)

    async def hold(who: Caller) -> None:
        async with receiving_.turn(who):
            await asyncio.Event().wait()

    silent = [caller("uid 1001", pid) for pid in range(1, 9)] + [caller("anybody", host="ipv4:10.0.0.1")] * 8
    tasks = [asyncio.create_task(hold(who)) for who in silent]
    await turns()
    for other in (caller("uid 1002", 9), caller("anybody", host="ipv4:10.0.0.2")):
        async with asyncio.timeout(10), receiving_.turn(other):
            pass
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_large_later_message_of_a_stream_keeps_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "BYTES_PER_S", _LARGE // 600)
    tenants = Tenants({"a": Quota(), "b": Quota()})
    calls = Receiving(tenants)
    caller = Caller(tenants.known("a"), Role.CLIENT, "x", "tcp")

    async def turn() -> None:
        async with calls.turn(caller):
            pass

    for nbytes, waits in ((1 << 20, False), (_LARGE, True)):  # a piece of a Put is not large
        async with calls.later(caller):
            set_message_bytes(nbytes)
        set_message_bytes(0)
        task = asyncio.create_task(turn())
        await turns()
        assert task.done() is not waits
    task.cancel()


class _Door:
    """A door that gives a message 0.05 s."""

    @asynccontextmanager
    async def first(self) -> AsyncIterator[float]:
        yield 0.05

    @asynccontextmanager
    async def later(self) -> AsyncIterator[None]:
        yield

    stream = later


async def test_a_call_has_a_message_in_time() -> None:
    async def one() -> str:
        set_message_bytes(100)
        return "one"

    async def none() -> None:
        return None

    set_door(_Door())
    assert await first_message(one) == "one" and message_bytes() == 100
    assert await later_message(none) is None and message_bytes() == 0
    with pytest.raises(TooSlowError, match=r"not here within 0\.05 s"):
        await first_message(asyncio.Event().wait)
