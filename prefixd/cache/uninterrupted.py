"""Work that is not interrupted where its caller is."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(work: Coroutine[object, object, T]) -> T:
    """Waits until `work` has ended, even when cancelled meanwhile; the cancellation is raised then."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None and not task.cancelled():
        task.exception()  # seen; the cancellation is what the caller asked for
        raise cancelled
    return task.result()
