"""The deadline of a call: it cancels the work of the call and raises an error that names the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefixd_swap.errors import RemoteStoreError


@asynccontextmanager
async def within(deadline_s: float, call: str, where: str) -> AsyncIterator[None]:
    """Cancels the body after `deadline_s` seconds.

    Args:
        deadline_s: seconds from now; NaN or 0 or less has passed already.
        call: for example "get of 16 objects".
        where: kind and address of the store.

    Raises:
        RemoteStoreError: the deadline has passed.
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
