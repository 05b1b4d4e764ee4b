"""Long work that is written once and runs in one of two ways: at once, or in slices beside other tasks of the event
loop.

Such work is a generator. When it yields None, other tasks may run; when it yields a function, it receives that
function's result, which a thread may have computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from prefixd.base.errors import ExhaustedError
from prefixd.base.long_work.pacer import give_way

T = TypeVar("T")

Steps = Generator[Callable[[], Any] | None, Any, T]


def do_at_once(steps: Steps[T]) -> T:
    """Runs all steps in the calling thread; returns their result."""
    result: Any = None
    while True:
        try:
            work = steps.send(result)
        except StopIteration as end:
            value: T = end.value
            return value
        result = None if work is None else work()


async def do_in_slices(steps: Steps[T]) -> T:
    """Runs each step in a callback of its own, and the functions in threads; returns the result.

    Raises:
        ExhaustedError: no thread can be started.
    """
    result: Any = None
    try:
        while True:
            try:
                work = steps.send(result)
            except StopIteration as end:
                value: T = end.value
                return value
            if work is None:
                result = None
                await give_way()
            else:
                result = await in_thread(work)
    finally:
        steps.close()


async def in_thread(work: Callable[[], T]) -> T:
    """Runs `work()` in a thread, so that the event loop does not wait for it; returns its result.

    Raises:
        ExhaustedError: no thread can be started.
    """
    try:
        return await asyncio.to_thread(work)
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise ExhaustedError(
            f"no thread could be started ({error}); raise the limit of processes (ulimit -u) or end others"
        ) from error
