"""Look-ups that begin together share a call: how many calls a burst of requests takes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from prefixd.cli.demo.daemon_process import DaemonProcess
from prefixd.client import AsyncCache, ExhaustedError, MatchResult, NamespaceSpec, PartSpec
from prefixd.integrations.engine.daemon_link import Link
from prefixd.integrations.engine.geometry import Geometry, Group
from prefixd.integrations.engine.waiting.match_batches import MatchBatches
from prefixd.integrations.engine.waiting.prefix_lookups import Lookups
from prefixd_scheduler import CostModel, LookAhead
from tests.integrations.engine.conftest import DEADLINE_S, LOG, PATIENT_S
from tests.waiting import until, wait_until


class Cache:
    """Stands for `AsyncCache`: a prompt has as many cached blocks as its first token says."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[list[Sequence[int]], list[bool]]] = []
        self.error = error
        self.go = asyncio.Event()
        self.go.set()

    async def match_many(self, prompts: list[Sequence[int]], *, counted: list[bool]) -> list[MatchResult]:
        self.calls.append((prompts, counted))
        await self.go.wait()
        if self.error is not None:
            raise self.error
        return [MatchResult(prompt[0], ()) for prompt in prompts]

    async def match(self, tokens: Sequence[int], *, counted: bool) -> MatchResult:
        return (await self.match_many([tokens], counted=[counted]))[0]


def ask(batches: MatchBatches, cache: Cache, *firsts: int) -> list[asyncio.Task[MatchResult]]:
    return [
        asyncio.create_task(batches.match(cast(AsyncCache, cache), [first], counted=first % 2 == 0)) for first in firsts
    ]


async def test_those_of_one_turn_share_a_call_for_each_namespace() -> None:
    batches, one, other = MatchBatches(DEADLINE_S), Cache(), Cache()
    answers = await asyncio.gather(*ask(batches, one, 1, 2, 3), *ask(batches, other, 4))
    assert [answer.blocks for answer in answers] == [1, 2, 3, 4]
    assert one.calls == [([[1], [2], [3]], [False, True, False])] and other.calls == [([[4]], [True])]
    assert (await asyncio.gather(*ask(batches, one, 5)))[0].blocks == 5 and len(one.calls) == 2


async def test_one_that_comes_during_a_call_does_not_wait_for_it() -> None:
    batches, cache = MatchBatches(DEADLINE_S), Cache()
    cache.go.clear()
    first = ask(batches, cache, 1, 2)
    await until(lambda: len(cache.calls) == 1)
    later = ask(batches, cache, 3)
    await until(lambda: len(cache.calls) == 2)
    cache.go.set()
    assert [answer.blocks for answer in await asyncio.gather(*first, *later)] == [1, 2, 3]


async def test_a_failure_is_everybodys_and_who_has_gone_is_left_out() -> None:
    batches, cache = MatchBatches(DEADLINE_S), Cache(ExhaustedError("full"))
    tasks = ask(batches, cache, 1, 2, 3)
    await asyncio.sleep(0)
    tasks[0].cancel()
    for error in (await asyncio.gather(*tasks, return_exceptions=True))[1:]:
        assert isinstance(error, ExhaustedError)
    assert [prompts for prompts, _ in cache.calls] == [[[2], [3]]]
    (gone,) = ask(batches, cache, 4)
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert len(cache.calls) == 1, "nobody is left to ask for"


async def test_a_call_without_an_answer_ends() -> None:
    batches, cache = MatchBatches(0.01), Cache()
    cache.go.clear()
    for error in await asyncio.gather(*ask(batches, cache, 1, 2), return_exceptions=True):
        assert isinstance(error, TimeoutError)


def counting(calls: Counter[str], method: Callable[..., Any]) -> Any:
    async def call(self: Any, *arguments: Any, **how: Any) -> Any:
        calls[method.__name__] += 1
        return await method(self, *arguments, **how)

    return call


@pytest.mark.slow
def test_a_burst_of_requests_takes_a_few_calls(daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    for method in (AsyncCache._match, AsyncCache.match_many):
        monkeypatch.setattr(AsyncCache, method.__name__, counting(calls, method))
    link = Link(daemon.address, "test", PATIENT_S, LOG)
    wait_until(lambda: link.up)
    geometry = Geometry((Group(0, 4, 64),), block_tokens=16, unit_tokens=4, ranks=1, layout="test")
    spec = NamespaceSpec("burst", 16, (PartSpec("all", 0, 64),))
    lookups = Lookups(link, geometry, LookAhead(CostModel(), lambda: 0.0, 0), None, clock=lambda: 0.0)

    async def store() -> None:
        """Nothing else runs in the link's thread meanwhile, as while it sends other calls."""
        await (await link.cache(spec)).store(list(range(80)), bytes(5 * 64))
        for number in range(64):
            lookups.add(str(number), spec, [*range(80), number] if number % 2 else [number] * 100)

    link.start(store).result(DEADLINE_S)
    wait_until(lambda: all(lookups.seen(str(number)) is not None for number in range(64)))
    found = [lookups.seen(str(number)) for number in range(64)]
    assert [seen.tokens for seen in found if seen is not None] == [0, 80] * 32
    assert calls == {"match_many": 1}, "where each was a call of its own, 64"
    lookups.clear()
    link.close()
