"""Long work that is written once and done in one of two ways: at once, or beside other tasks of the event loop.

Such work is a generator. Where it yields None, others may run; where it yields a function, it is sent that function's
result, which a thread may have computed meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, TypeVar

from prefixd.base.errors import ExhaustedError
from prefixd.base.pacer import give_way

T = TypeVar("T")

Steps = Generator[Callable[[], Any] | None, Any, T]


def do_at_once(steps: Steps[T]) -> T:
    """Does all of it in the calling thread."""
    result: Any = None
    while True:
        try:
            work = steps.send(result)
        except StopIteration as end:
            value: T = end.value
            return value
        result = None if work is None else work()


async def do_in_slices(steps: Steps[T]) -> T:
    """Does what lies between two yields in one callback of the event loop, and the functions in threads.

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
    """`work()` in a thread, for work that takes longer than others should wait.

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
