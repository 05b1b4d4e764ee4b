"""What an engine on CUDA needs beside copies: the arena registered with the driver, and fences in the compute stream.

`make gpu-check` runs it on a GPU; elsewhere the tests run it against a stand-in driver.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch

from prefixd.client import Arena
from prefixd.integrations.engine.geometry import Geometry
from prefixd_swap import HostPin, PageCopies, StreamMark, SwapError

Fence = Callable[[], None]
"""Blocks until what it was made after has been computed; called in a thread."""


def computed_already() -> None:
    """The fence on a CPU, where a step has computed when it returns."""


def fence_of(ordinal: int | None, stream: int | None = None) -> Fence:
    """A fence after what was submitted by now to a stream of CUDA device `ordinal`; for None, a CPU's.

    `stream` is a handle; None: the one that torch computes in.
    """
    if ordinal is None:
        return computed_already
    return StreamMark(ordinal, torch.cuda.current_stream(ordinal).cuda_stream if stream is None else stream).wait


def page_copies_of(ordinal: int | None, geometry: Geometry, log: logging.Logger) -> PageCopies | None:
    """What copies blocks in batches on CUDA device `ordinal`; None, and blocks are copied page by page, on a CPU and
    where the device has no room for the buffers, which is logged."""
    if ordinal is None:
        return None
    try:
        return PageCopies(ordinal, max(group.part_bytes for group in geometry.groups))
    except SwapError as error:
        log.warning("prefixd: blocks are copied page by page, which is slower: %s", error)
        return None


class ArenaPin:
    """Keeps the arena that is in use registered with CUDA, so that copies run at full speed beside the model.

    For one event loop. Registering touches every page, which takes a while: it happens in a thread, slice by slice, and
    nobody waits for it.

    Args:
        ordinal: the CUDA device.
        log: told when the arena could not be registered.
    """

    def __init__(self, ordinal: int, log: logging.Logger) -> None:
        self._ordinal = ordinal
        self._log = log
        self._arena: Arena | None = None
        self._pin: HostPin | None = None
        self._bytes: Any = None  # keeps the mapping while CUDA knows it, also past its session's end
        self._one = asyncio.Lock()
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @asynccontextmanager
    async def use(self, arena: Arena, check: Callable[[], None]) -> AsyncIterator[None]:
        """Has `arena` being registered, in place of an earlier one once nobody uses that, for as long as the context
        lasts.

        `check` raises when the arena is not to be used any more.
        """
        async with self._one:
            if self._arena is not arena:
                await self._unused.wait()
                check()
                await asyncio.to_thread(self._change, arena)
            self._users += 1
            self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    def drop(self) -> None:
        """Undoes it, when nothing is copied any more."""
        if self._pin is not None:
            self._pin.close()
        self._arena = self._bytes = self._pin = None

    def _change(self, arena: Arena) -> None:
        self.drop()
        self._bytes = arena.bytes_at(0, arena.nbytes)
        self._pin = HostPin(arena.address, arena.nbytes, self._ordinal, self._failed)
        self._arena = arena

    def _failed(self, why: str) -> None:
        self._log.warning("prefixd: the arena could not be pinned: %s", why)
