"""Refusals of one tenant wait when there are many, and a call leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from prefixd.base.tenancy.tenants import Quota, Role, Tenants
from prefixd.server.access.identities import Caller
from prefixd.server.rpc import call_limits
from prefixd.server.rpc.call_limits import CallersCall, CallLimits, Refusals
from prefixd.server.rpc.receiving import CURRENT_CALL


@pytest.fixture
def tenants() -> Tenants:
    return Tenants({"a": Quota(), "b": Quota()})


async def told_at_once(refusing: Refusals, who: object, count: int) -> int:
    """How many of so many refusals do not wait."""
    tasks = [asyncio.create_task(refusing.turn(who)) for _ in range(count)]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    told = sum(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return told


async def test_a_few_are_told_at_once_and_more_in_time(tenants: Tenants) -> None:
    refusing, loop = Refusals(tenants), asyncio.get_running_loop()
    a, begin_s = tenants.known("a"), loop.time()
    await asyncio.gather(*(refusing.turn(a) for _ in range(call_limits._AT_ONCE + 10)))
    assert loop.time() - begin_s >= 9 / call_limits.PER_S


async def test_each_tenant_waits_for_itself(tenants: Tenants) -> None:
    refusing = Refusals(tenants)
    asked = call_limits._AT_ONCE + 40
    for who in (tenants.known("a"), tenants.known("b"), None):
        assert call_limits._AT_ONCE <= await told_at_once(refusing, who, asked) < asked


async def test_so_many_wait_and_more_are_told_at_once(tenants: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_limits, "_AT_ONCE", 0)
    monkeypatch.setattr(call_limits, "PER_S", 1 / 600)
    monkeypatch.setattr(call_limits, "WAITING", 64)
    refusing, a = Refusals(tenants), tenants.known("a")
    assert await told_at_once(refusing, a, 40 + 3) == 3, "eight are kept for each of the others"
    assert await told_at_once(refusing, a, 40 + 2) == 2, "who goes away waits no more"


async def test_with_one_tenant_only_those_who_are_not_known_wait() -> None:
    tenants = Tenants()
    refusing, many = Refusals(tenants), call_limits._AT_ONCE + 40
    assert await told_at_once(refusing, tenants.default, many) == many
    assert await told_at_once(refusing, None, many) < many


async def test_who_goes_away_takes_nobodys_turn(tenants: Tenants) -> None:
    refusing, a = Refusals(tenants), tenants.known("a")
    await told_at_once(refusing, a, call_limits._AT_ONCE + 300)
    async with asyncio.timeout(3 / call_limits.PER_S + 10):
        await refusing.turn(a)


async def test_a_call_needs_no_garbage_collector(tenants: Tenants) -> None:
    limits, caller = CallLimits(tenants, 1), Caller(tenants.known("a"), Role.CLIENT, "a", "tcp")

    async def serve() -> weakref.ref[CallersCall]:
        task = asyncio.current_task()
        assert task is not None
        call = limits.begin("/prefixd.v1.PrefixCache/Put", caller, task)
        CURRENT_CALL.set(call)  # in the task's context
        async with call.first(), call.later():
            return weakref.ref(call)

    gc.collect()
    gc.disable()
    try:
        call = await asyncio.create_task(serve())
        await asyncio.create_task(serve())  # the turns still know the call that began last
        assert call() is None
    finally:
        gc.enable()
