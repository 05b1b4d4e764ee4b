"""Runs several jobs at a time; after a failure no job is left running."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


async def side_by_side(jobs: Sequence[Callable[[], Awaitable[_T]]], most: int) -> list[_T]:
    """Runs `jobs`, `most` at a time, and returns their results. After a failure it cancels the others and waits for
    them.

    Raises:
        Exception: the error of the first job that failed.
    """
    if len(jobs) == 1:
        return [await jobs[0]()]
    results: dict[int, _T] = {}
    numbers = iter(range(len(jobs)))

    async def worker() -> None:
        for number in numbers:
            results[number] = await jobs[number]()

    workers = [asyncio.ensure_future(worker()) for _ in range(min(most, len(jobs)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [results[number] for number in range(len(jobs))]
