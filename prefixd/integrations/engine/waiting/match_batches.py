"""Lets look-ups that begin together share one call to the daemon.

Requests come to an engine in bursts, and each is looked up at its arrival. The look-ups that reach the link's event
loop in the same turn are asked in one `match_many` for each namespace. None waits for another one to come.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from prefixd.client import AsyncCache, MatchResult
from prefixd.client.messages import TokenIds


@dataclass(slots=True)
class _Asked:
    tokens: TokenIds
    counted: bool
    answer: asyncio.Future[MatchResult]


class MatchBatches:
    """Collects look-ups of one turn of the event loop. Used in the link's thread alone.

    Args:
        timeout_s: time limit of a call; those who ask have one of their own.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._collected: dict[AsyncCache, list[_Asked]] = {}
        self._calls: set[asyncio.Task[None]] = set()

    async def match(self, cache: AsyncCache, tokens: TokenIds, *, counted: bool) -> MatchResult:
        """As `AsyncCache.match`."""
        loop = asyncio.get_running_loop()
        asked = _Asked(tokens, counted, loop.create_future())
        if cache not in self._collected:
            self._collected[cache] = []
            loop.call_soon(self._start, cache)
        self._collected[cache].append(asked)
        return await asked.answer

    def _start(self, cache: AsyncCache) -> None:
        asked = [each for each in self._collected.pop(cache) if not each.answer.done()]
        if asked:
            call = asyncio.ensure_future(self._ask(cache, asked))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _ask(self, cache: AsyncCache, asked: list[_Asked]) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                if len(asked) == 1:
                    answers = [await cache.match(asked[0].tokens, counted=asked[0].counted)]
                else:
                    counted = [each.counted for each in asked]
                    answers = await cache.match_many([each.tokens for each in asked], counted=counted)
            for each, answer in zip(asked, answers, strict=True):
                if not each.answer.done():  # else its caller has given up
                    each.answer.set_result(answer)
        except Exception as error:
            for each in asked:
                if not each.answer.done():
                    each.answer.set_exception(error)
        finally:
            for each in asked:
                each.answer.cancel()  # if this call was cancelled
