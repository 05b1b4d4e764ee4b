"""What calls have not read yet is bounded for all of them together, and tenants share it."""

from __future__ import annotations

import asyncio

import pytest

from prefixd.base.errors import ExhaustedError
from prefixd.base.tenancy.tenants import Quota, Tenants
from prefixd.serving.generation.inbox import Inbox
from prefixd.serving.request.request_events import Ended, NewTokens
from prefixd_scheduler import SharedLimit


class Calls:
    """Calls of tenants a and b, of 3 values a token, which have 160 together."""

    def __init__(self) -> None:
        self._tenants = Tenants({"a": Quota(), "b": Quota()})
        self.of_all = SharedLimit(160, lambda: 2)
        self.ended: list[Inbox] = []

    def begin(self, name: str, *, keeps: bool = False) -> Inbox:
        inbox = Inbox(3, lambda: self.ended.append(inbox), self._tenants.known(name), self.of_all, keeps=keeps)
        return inbox

    def refused(self, name: str) -> int:
        return self._tenants.known(name).refused["unread_tokens"]


def tell(inbox: Inbox, tokens: int) -> None:
    inbox.put(0, NewTokens(list(range(tokens))))


async def test_who_does_not_read_takes_no_more_than_its_part_and_what_is_free() -> None:
    calls = Calls()
    first, second, other = calls.begin("a"), calls.begin("a"), calls.begin("b")
    tell(first, 20)
    tell(second, 20)
    assert calls.of_all["a"] == 120
    tell(second, 1)
    with pytest.raises(
        ExhaustedError, match=r"tenant a: 120 tokens .* and 120 of all tenants, which have 160 together"
    ):
        await second.get()
    await asyncio.sleep(0)
    assert calls.ended == [second] and calls.refused("a") == 1 and calls.of_all["a"] == 60, "its own went"
    tell(other, 13)
    assert await first.get() == (0, NewTokens(list(range(20)))) and calls.of_all["a"] == 0
    tell(first, 1)
    assert (await first.get())[1] == NewTokens([0])
    assert calls.refused("b") == 0 and calls.of_all["b"] == 39


async def test_what_is_kept_counts_to_the_end() -> None:
    calls = Calls()
    inbox = calls.begin("a", keeps=True)
    tell(inbox, 10)
    await inbox.get()
    assert calls.of_all["a"] == 30
    inbox.close()
    tell(inbox, 10)
    inbox.put(0, Ended("stop"))
    assert not calls.of_all.total, "whatever the worker still says of it"
