"""A call's deadline: when the time is up, what it waits for is cancelled, and the error says which store was slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefixd_swap.errors import RemoteStoreError


@asynccontextmanager
async def within(deadline_s: float, call: str, where: str) -> AsyncIterator[None]:
    """Cancels the body after `deadline_s` seconds.

    Args:
        deadline_s: seconds from now; NaN and anything up to 0 has already passed.
        call: for example "get of 16 objects".
        where: kind and address of the store.

    Raises:
        RemoteStoreError: the time was up.
    """
    late = (
        f"{where}: {call} has not ended within {deadline_s:.3g} s; see whether store and network are overloaded, and "
        "whether port and TLS are right"
    )
    if not deadline_s > 0:
        raise RemoteStoreError(late)
    try:
        async with asyncio.timeout(deadline_s):
            yield
    except TimeoutError as error:
        raise RemoteStoreError(late) from error
