"""When the messages of calls may be received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prefixd.server import receiving
from prefixd.server.receiving import Receiving, message_received
from prefixd.tenants import Quota, Tenant, Tenants

_LARGE = 16 << 20


class Calls:
    """Calls of tenants whose messages arrive when a test says."""

    def __init__(self, *tenants: str) -> None:
        self.tenants = Tenants(dict.fromkeys(tenants, Quota()))
        self._receiving = Receiving(self.tenants)
        self._arrive: dict[str, asyncio.Future[int]] = {}
        self.receiving: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def send(self, *names: str) -> None:
        """Each is of the tenant by its first letter, or of the default one."""
        for name in names:
            self._arrive[name] = asyncio.get_running_loop().create_future()
            self.tasks[name] = asyncio.create_task(self._call(name))

    def arrive(self, name: str, nbytes: int = 100) -> None:
        self._arrive[name].set_result(nbytes)

    async def _call(self, name: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        await self._receiving.turn(self._tenant(name), task)
        self.receiving.append(name)
        try:
            message_received(await self._arrive[name])
        finally:
            self.receiving.remove(name)

    def _tenant(self, name: str) -> Tenant:
        return self.tenants.get(name[0]) or self.tenants.default


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def ended(calls: Calls) -> AsyncIterator[None]:
    """All calls end in it."""
    yield
    for task in calls.tasks.values():
        task.cancel()
    await asyncio.gather(*calls.tasks.values(), return_exceptions=True)


async def test_so_many_messages_of_a_tenant_are_on_their_way() -> None:
    calls = Calls()
    async with ended(calls):
        calls.send(*(f"-{number}" for number in range(receiving.AT_ONCE + 2)))
        await turns()
        assert len(calls.receiving) == receiving.AT_ONCE
        calls.arrive("-3", _LARGE)
        calls.tasks["-5"].cancel()
        await turns()
        assert len(calls.receiving) == receiving.AT_ONCE and {"-16", "-17"} < set(calls.receiving)


async def test_between_tenants_one_comes_after_the_other() -> None:
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


async def test_after_a_large_one_the_next_of_its_tenant_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "BYTES_PER_S", 4 * _LARGE)
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
        assert asyncio.get_running_loop().time() - begin_s > 0.24


async def test_one_that_does_not_come_keeps_the_next_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "RECEIVE_S", 0.5)
    calls = Calls("a")
    async with ended(calls):
        calls.send("a1", "a2")
        await turns()
        assert calls.receiving == ["a1"]
        while calls.receiving != ["a1", "a2"]:
            await asyncio.sleep(0.005)
        with pytest.raises(asyncio.CancelledError):
            await calls.tasks["a1"]


async def test_who_has_gone_takes_nothing_along() -> None:
    calls = Calls("a")
    async with ended(calls):
        calls.send("a1", "a2")
        await turns()
        calls.tasks["a2"].cancel()
        calls.arrive("a1")
        await turns()
        calls.send(*(f"a{number}" for number in range(3, 3 + receiving.AT_ONCE)))
        for number in range(3, 3 + receiving.AT_ONCE):
            await turns()
            assert calls.receiving == [f"a{number}"]
            calls.arrive(f"a{number}")
