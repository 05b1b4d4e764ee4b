"""When the messages of calls may be received."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest

from prefixd.base.errors import ExhaustedError, TooSlowError
from prefixd.base.tenancy.tenants import Quota, Role, Tenants
from prefixd.planner.simulation.event_loop import SimulatedTimeLoop
from prefixd.server.access.identities import Caller
from prefixd.server.rpc import receiving
from prefixd.server.rpc.receiving import Call, Line, Receiving, first_message, later_message

_LARGE = 16 << 20


class TenantsCall(Call):
    """A caller's call."""

    def __init__(self, receiving_: Receiving, caller: Caller) -> None:
        super().__init__(caller)
        self._receiving = receiving_
        self._caller = caller

    def first(self) -> AbstractAsyncContextManager[Line | None]:
        return self._receiving.first(self._caller, self)


class Calls:
    """Calls of tenants whose messages arrive when a test says.

    A call's name is its tenant's letter, or `-` for the default one, its caller's, and a number.
    """

    def __init__(self, *tenants: str) -> None:
        self.tenants = Tenants(dict.fromkeys(tenants, Quota()))
        self._receiving = Receiving(self.tenants)
        self._arrive: dict[str, asyncio.Future[int]] = {}
        self.receiving: list[str] = []
        self.put_together: list[tuple[str, float]] = []
        """In order, and when."""
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def send(self, *names: str, role: Role = Role.CLIENT) -> None:
        for name in names:
            self._arrive[name] = asyncio.get_running_loop().create_future()
            self.tasks[name] = asyncio.create_task(self._call(name, role))

    def arrive(self, *names: str, nbytes: int = 100) -> None:
        for name in names:
            self._arrive[name].set_result(nbytes)

    async def _call(self, name: str, role: Role) -> None:
        tenant = self.tenants.get(name[0]) or self.tenants.default

        async def read() -> bytes:
            self.receiving.append(name)
            try:
                nbytes = await self._arrive[name]
            finally:
                self.receiving.remove(name)
            self.put_together.append((name, asyncio.get_running_loop().time()))
            return bytes(nbytes)

        call = TenantsCall(self._receiving, Caller(tenant, role, name[:2], "tcp"))
        message = await first_message(call, read)
        assert message is not None and call.message_bytes == len(message)


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
        calls.arrive("-x1", nbytes=_LARGE)
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


def test_between_tenants_those_that_are_here_at_once_are_put_together_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "BYTES_PER_S", 4 * _LARGE)

    async def work() -> None:
        calls = Calls("a", "b")
        async with ended(calls):
            calls.send("a1", "a2", "ax1", "b1", "b2", "ax2")
            await turns()
            assert calls.receiving == ["a1", "a2", "ax1", "b1", "b2", "ax2"]
            calls.arrive("a1", "a2", "b1", nbytes=_LARGE)
            calls.arrive("b2", "ax1")
            await asyncio.sleep(1.0)
            expected = [("a1", 0.0), ("b1", 0.0), ("a2", 0.25), ("b2", 0.25), ("ax1", 0.5)]
            assert [name for name, _ in calls.put_together] == [name for name, _ in expected]
            assert [at_s for _, at_s in calls.put_together] == pytest.approx([at_s for _, at_s in expected], abs=0.01)
            assert calls.receiving == ["ax2"], "one that does not come keeps no other waiting"

    simulate(work())


async def test_a_lone_tenant_waits_in_no_line() -> None:
    calls = Calls()
    async with ended(calls):
        calls.send("-x1", "-x2", "-x3")
        await turns()
        calls.arrive("-x1", "-x2", "-x3", nbytes=_LARGE)
        await turns()
        assert [name for name, _ in calls.put_together] == ["-x1", "-x2", "-x3"]


def test_who_is_cancelled_in_line_goes_to_its_end_keeps_its_place_and_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "BYTES_PER_S", 4 * _LARGE)

    async def work() -> None:
        calls = Calls("a", "b")
        async with ended(calls):
            calls.send(*(f"ax{number}" for number in range(receiving.AT_ONCE_OF_CALLER + 1)))
            await turns()
            calls.arrive("ax0", "ax1", "ax2", "ax3", nbytes=_LARGE)
            await turns()
            calls.tasks["ax1"].cancel()
            calls.tasks["ax2"].cancel()
            await asyncio.sleep(0.1)
            calls.arrive("ax4", nbytes=_LARGE)
            assert not calls.tasks["ax1"].done() and not calls.tasks["ax2"].done()
            assert calls.receiving == ["ax1", "ax2", "ax3", "ax4"], "the first one's place alone was free"
            await asyncio.sleep(2.0)
            assert [name for name, _ in calls.put_together] == ["ax0", "ax3", "ax1", "ax2", "ax4"]
            assert [at_s for _, at_s in calls.put_together] == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0], abs=0.01)
            assert [name for name, task in calls.tasks.items() if task.cancelled()] == ["ax1", "ax2"]

    simulate(work())


def test_who_is_cancelled_just_when_its_message_is_here_waits_in_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "BYTES_PER_S", 4 * _LARGE)

    async def work() -> None:
        calls = Calls("a", "b")
        async with ended(calls):
            calls.send("a1", "a2", "a3")
            await turns()
            calls.arrive("a1", nbytes=_LARGE)
            await turns()
            calls.arrive("a2", nbytes=_LARGE)
            calls.tasks["a2"].cancel()
            await turns()
            assert calls.receiving == ["a2", "a3"]
            calls.arrive("a3")
            await asyncio.sleep(1.0)
            assert [name for name, _ in calls.put_together] == ["a1", "a2", "a3"]
            assert [at_s for _, at_s in calls.put_together] == pytest.approx([0.0, 0.25, 0.5], abs=0.01)
            assert calls.tasks["a2"].cancelled() and not calls.tasks["a3"].cancelled()

    simulate(work())


def test_the_time_in_line_is_not_the_time_that_a_message_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "BYTES_PER_S", _LARGE / 100)

    async def work() -> None:
        calls = Calls("a", "b")
        async with ended(calls):
            calls.send("a1", "a2")
            await turns()
            calls.arrive("a1", "a2", nbytes=_LARGE)
            await calls.tasks["a2"]
            assert [name for name, _ in calls.put_together] == ["a1", "a2"]
            assert calls.put_together[1][1] == pytest.approx(100.0)

    simulate(work())


async def test_what_a_read_fails_with_or_gives_instead_is_the_calls() -> None:
    """gRPC's gives None where its future has failed."""
    tenants = Tenants({"a": Quota(), "b": Quota()})
    call = TenantsCall(Receiving(tenants), Caller(tenants.known("a"), Role.CLIENT, "x", "tcp"))

    async def read(failing: asyncio.Future[int]) -> int | None:
        try:
            return await failing
        except LookupError:
            return None

    for error in (LookupError(), ValueError("five")):
        failing: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(first_message(call, partial(read, failing)))
        await turns()
        failing.set_exception(error)
        if isinstance(error, LookupError):
            assert await task is None
        else:
            with pytest.raises(ValueError, match="five"):
                await task


async def test_all_processes_of_a_user_and_all_calls_from_a_host_are_one_caller() -> None:
    tenants = Tenants()
    receiving_ = Receiving(tenants)

    def caller(name: str, pid: int = 0, host: str = "") -> Caller:
        return Caller(tenants.default, Role.CLIENT, name, "unix" if pid else "tcp", pid, host)

    async def hold(who: Caller) -> None:
        async with receiving_.first(who, Call(who)):
            await asyncio.Event().wait()

    silent = [caller("uid 1001", pid) for pid in range(1, 9)] + [caller("anybody", host="ipv4:10.0.0.1")] * 8
    tasks = [asyncio.create_task(hold(who)) for who in silent]
    await turns()
    for other in (caller("uid 1002", 9), caller("anybody", host="ipv4:10.0.0.2")):
        async with asyncio.timeout(10), receiving_.first(other, Call(other)):
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
        async with calls.first(caller, Call(caller)) as line:
            assert line is not None
            await line.turn()

    async with calls.later(replace(caller, role=Role.ADMIN), Call(caller)) as line:
        assert line is None, "operators do not wait"
    for nbytes, waits in ((1 << 20, False), (_LARGE, True)):  # a piece of a Put is not large
        async with calls.later(caller, call := Call(caller)):
            call.message_bytes = nbytes
        task = asyncio.create_task(turn())
        await turns()
        assert task.done() is not waits
    task.cancel()


class _Short(Call):
    """A call that gives a message 0.05 s."""

    receive_s = 0.05

    def __init__(self, line: Line | None) -> None:
        super().__init__(None)
        self._line = line

    @asynccontextmanager
    async def first(self) -> AsyncIterator[Line | None]:
        yield self._line

    later = first


@pytest.mark.parametrize("in_line", [False, True])
async def test_a_call_has_a_message_in_time(in_line: bool) -> None:
    async def one() -> bytes:
        return b"one"

    async def none() -> object:
        return grpc.aio.EOF

    call = _Short(Line() if in_line else None)
    assert await first_message(call, one) == b"one" and call.message_bytes == 3
    assert await later_message(call, none) is None and call.message_bytes == 0
    with pytest.raises(TooSlowError, match=r"did not arrive within 0\.05 s"):
        await first_message(call, asyncio.Event().wait)
