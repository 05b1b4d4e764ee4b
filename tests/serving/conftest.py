"""Fixtures of the tests of serving."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest

from prefixd.serving.request.request import Request
from prefixd.serving.request.request_events import Ended, NewTokens
from tests.serving.bench import Bench, open_bench
from tests.serving.fake_worker import next_token


@pytest.fixture(scope="module")
def expected() -> Callable[[Sequence[int], int], list[int]]:
    """`expected(prompt, n)`: the right answer."""

    def answer(prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(next_token(tokens))
        return tokens[len(prompt) :]

    return answer


@pytest.fixture(scope="module")
def events() -> Callable[[Request], tuple[list[int], object]]:
    """`events(request)`: the tokens it was sent so far, and how it ended (a reason or an error; None if it has not)."""

    def drain(request: Request) -> tuple[list[int], object]:
        tokens: list[int] = []
        end: object = None
        while not request.events.empty():
            event = request.events.get_nowait()
            assert end is None, "an event after the last one"
            if isinstance(event, NewTokens):
                tokens += event.token_ids
            else:
                end = event.reason if isinstance(event, Ended) else event
        return tokens, end

    return drain


@pytest.fixture
async def make_bench() -> AsyncIterator[Callable[..., Awaitable[Bench]]]:
    """`await make_bench(frames, ...)` opens a bench (`open_bench`) that is closed at the end of the test."""
    async with AsyncExitStack() as stack:
        yield lambda *sizes, **options: stack.enter_async_context(open_bench(*sizes, **options))


@pytest.fixture(scope="module")
def bench_of() -> Callable[..., AbstractAsyncContextManager[Bench]]:
    """The same for tests that open many, each in a loop of its own."""
    return open_bench
