"""Calls of several tenants begin in turn, and none takes the last calls from the others."""

from __future__ import annotations

import asyncio

import pytest

from prefixd.base.errors import ExhaustedError
from prefixd.base.tenancy import fairness as call_turns
from prefixd.base.tenancy.fairness import LONGEST_TURNS, CallTurns
from prefixd.base.tenancy.tenants import Quota, Role, Tenants
from prefixd.server.access.identities import Caller
from prefixd.server.rpc import call_limits
from prefixd.server.rpc.call_limits import CallLimits

MATCH, GET, GENERATE, SESSION, HEALTH = (
    "/prefixd.v1.PrefixCache/Match",
    "/prefixd.v1.PrefixCache/Get",
    "/prefixd.v1.Inference/Generate",
    "/prefixd.v1.PrefixCache/OpenSession",
    "/grpc.health.v1.Health/Check",
)


@pytest.fixture(autouse=True)
def turns_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long they take on this machine."""
    monkeypatch.setattr(call_turns, "LONGEST_S", 60.0)


class Calls:
    """Calls that begin when it is their turn, and end when a test says."""

    def __init__(self) -> None:
        self.turns = CallTurns()
        self.begun: list[str] = []
        self._ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def send(self, *names: str) -> None:
        """Each is of the tenant by its first letter."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._call(name))

    def end(self, name: str) -> None:
        self._ends[name].set()

    async def _call(self, name: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        await self.turns.begin(name[0], task)
        self.begun.append(name)
        await self._ends[name].wait()


async def loop_turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_the_lines_of_the_tenants_take_turns() -> None:
    calls = Calls()
    calls.send("c0")
    await loop_turns(1)
    calls.send(*(f"c{number}" for number in range(1, 6)), "a1", "a2", "b1")
    for name in (expected := ["c0", "c1", "a1", "b1", "c2", "a2", "c3", "c4", "c5"]):
        await loop_turns(4)
        assert calls.begun[-1] == name and len(calls.begun) == expected.index(name) + 1
        calls.end(name)
    await asyncio.gather(*calls.tasks.values())


async def test_a_call_that_waits_for_its_caller_is_not_waited_for() -> None:
    calls = Calls()
    calls.send("a1", "b1", "b2")
    await loop_turns(4)
    assert calls.begun == ["a1"]
    calls.turns.pause(calls.tasks["b1"])
    await loop_turns(4)
    assert calls.begun == ["a1"], "it is another one's turn"
    calls.turns.pause(calls.tasks["a1"])
    await loop_turns(4)
    assert calls.begun == ["a1", "b1"]
    for name in ("a1", "b1", "b2"):
        calls.end(name)
    await asyncio.gather(*calls.tasks.values())


async def test_a_call_that_waits_for_something_is_not_waited_for() -> None:
    calls = Calls()
    calls.send("a1", "b1", "a2")
    await loop_turns(LONGEST_TURNS - 2)
    assert calls.begun == ["a1"]
    await loop_turns(8)
    assert calls.begun == ["a1", "b1"]
    await loop_turns(LONGEST_TURNS)
    assert calls.begun == ["a1", "b1", "a2"]
    for name in calls.tasks:
        calls.end(name)
    await asyncio.gather(*calls.tasks.values())


async def test_a_call_that_takes_long_is_not_waited_for_though_its_turns_were_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each turn of the loop takes as long as a slice of somebody's long work."""
    calls = Calls()
    calls.send("a1", "b1")
    await loop_turns(4)
    assert calls.begun == ["a1"]
    monkeypatch.setattr(call_turns, "LONGEST_S", 0.0)
    await loop_turns(4)
    assert calls.begun == ["a1", "b1"]
    for name in calls.tasks:
        calls.end(name)
    await asyncio.gather(*calls.tasks.values())


async def test_nobody_waits_for_a_caller_who_has_gone() -> None:
    calls = Calls()
    calls.send("a1", "b1", "b2", "b3")
    await loop_turns(2)
    calls.tasks["b1"].cancel()
    calls.tasks["b2"].cancel()
    await loop_turns(2)
    calls.end("a1")
    await loop_turns(4)
    assert calls.begun == ["a1", "b3"]
    calls.tasks["b3"].cancel()  # after its turn has come
    calls.send("c1")
    await loop_turns(4)
    assert calls.begun[-1] == "c1"


async def test_a_call_that_meets_nobody_does_not_wait() -> None:
    turns, task = CallTurns(), asyncio.current_task()
    assert task is not None
    with pytest.raises(StopIteration):
        turns.begin("a", task).send(None)  # type: ignore[attr-defined]


async def test_where_there_is_one_tenant_calls_take_no_turns() -> None:
    async def begun(tenants: Tenants) -> int:
        limits, ended, count = CallLimits(tenants, 16), asyncio.Event(), 0

        async def call() -> None:
            nonlocal count
            task = asyncio.current_task()
            assert task is not None
            await limits.turn(tenants.default, task)
            count += 1
            await ended.wait()

        tasks = [asyncio.create_task(call()) for _ in range(5)]
        await loop_turns(3)
        at_first = count
        ended.set()
        await asyncio.gather(*tasks)
        return at_first

    assert await begun(Tenants()) == 5
    assert await begun(Tenants({"another": Quota()})) == 1


async def test_no_tenant_takes_the_last_calls_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "CALLS", 12)
    tenants = Tenants({"a": Quota(), "b": Quota(calls=4)})
    limits, hold = CallLimits(tenants, 16), asyncio.Event()
    tasks: list[asyncio.Task[bool]] = []

    def caller(name: str, role: Role = Role.CLIENT) -> Caller:
        return Caller(tenants.known(name), role, name, "tcp")

    def begin(name: str) -> None:
        limits.begin(MATCH, caller(name), task := asyncio.create_task(hold.wait()))
        tasks.append(task)

    for _ in range(6):
        begin("a")
    with pytest.raises(ExhaustedError, match=r"tenant a: 6 calls are under way, and 6 of all .* each may have 2"):
        begin("a")
    assert tenants.known("a").refused["calls"] == 1
    limits.begin(MATCH, caller("a", Role.ADMIN), task := asyncio.create_task(hold.wait()))
    tasks.append(task)
    for _ in range(2):
        begin("b")
    with pytest.raises(ExhaustedError, match="tenant b: 2 calls are under way, and 9 of all tenants"):
        begin("b")
    hold.set()
    await asyncio.gather(*tasks)
    assert limits.calls(tenants.known("a")) == limits.calls(tenants.known("b")) == 0
    hold.clear()
    for _ in range(4):
        begin("b")
    with pytest.raises(ExhaustedError, match=r"limit tenants\.b\.calls"):
        begin("b")
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize(("method", "what"), [(GENERATE, "calls of Generate"), (HEALTH, "calls to the health service")])
async def test_calls_that_may_last_are_shared_apart_from_the_others(
    monkeypatch: pytest.MonkeyPatch, method: str, what: str
) -> None:
    monkeypatch.setattr(call_limits, "HEALTH_CALLS", 16)
    tenants = Tenants({"a": Quota(calls=1), "b": Quota()})
    limits, hold = CallLimits(tenants, generations=16), asyncio.Event()
    tasks: list[asyncio.Task[bool]] = []

    def begin(name: str, method: str, role: Role = Role.CLIENT) -> None:
        tasks.append(asyncio.create_task(hold.wait()))
        limits.begin(method, Caller(tenants.known(name), role, name, "tcp"), tasks[-1])

    for _ in range(12):  # 2 of its own and 10 for whoever comes first
        begin("a", method)
    with pytest.raises(ExhaustedError, match=rf"tenant a: 12 {what} are under way, and 12 of all .* have 16 together"):
        begin("a", method)
    begin("a", method, Role.ADMIN)
    begin("a", MATCH)
    begin("a", SESSION)
    for _ in range(2):
        begin("b", method)
    with pytest.raises(ExhaustedError, match=f"tenant b: 2 {what}"):
        begin("b", method)
    hold.set()
    await asyncio.gather(*tasks)
    begin("a", method)
    tasks[-1].cancel()


async def test_of_calls_under_way_some_may_be_of_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "GETS", 16)
    tenants = Tenants({"a": Quota(calls=14), "b": Quota()})
    limits, hold = CallLimits(tenants, 16), asyncio.Event()
    tasks: list[asyncio.Task[bool]] = []

    def begin(name: str, method: str = GET) -> None:
        tasks.append(asyncio.create_task(hold.wait()))
        limits.begin(method, Caller(tenants.known(name), Role.CLIENT, name, "tcp"), tasks[-1])

    for _ in range(12):
        begin("a")
    with pytest.raises(ExhaustedError, match=r"tenant a: 12 calls of Get are under way"):
        begin("a")
    begin("a", MATCH)
    with pytest.raises(ExhaustedError, match=r"tenant a: 14 of 14 calls are under way"):
        begin("a")
    begin("b")
    hold.set()
    await asyncio.gather(*tasks)
    begin("a")
    tasks[-1].cancel()
