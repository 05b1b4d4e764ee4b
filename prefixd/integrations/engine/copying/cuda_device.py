"""Registers the arena with the CUDA driver, and makes fences in an engine's compute stream.

`make gpu-check` tests it on a GPU; elsewhere the tests use a stand-in driver.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import torch

from prefixd.base.errors import ConfigError
from prefixd.client import Arena
from prefixd.integrations.engine.geometry import Geometry
from prefixd_swap import HostPin, PageCopies, StreamMark, SwapError

if TYPE_CHECKING:
    from prefixd_swap.codecs.on_device.object_copies import ObjectCopies
    from prefixd_swap.codecs.on_device.paged_parts import PagedLayers

Fence = Callable[[], None]
"""Blocks until the work that was submitted before the fence has been computed; called in a thread."""


def computed_already() -> None:
    """The fence on a CPU: a step has computed when it returns."""


def fence_of(ordinal: int | None, stream: int | None = None) -> Fence:
    """A fence behind the work submitted so far to a stream of CUDA device `ordinal`; None: a CPU's fence.

    `stream` is a handle; None: the stream that torch computes in.
    """
    if ordinal is None:
        return computed_already
    return StreamMark(ordinal, computing_stream(ordinal) if stream is None else stream).wait


def computing_stream(ordinal: int) -> int:
    """The handle of the stream that torch computes in on CUDA device `ordinal`."""
    return torch.cuda.current_stream(ordinal).cuda_stream


def page_copies_of(ordinal: int | None, geometry: Geometry, log: logging.Logger) -> PageCopies | None:
    """The batch copies of CUDA device `ordinal`. None on a CPU, and with a log line where the device has no room for
    the buffers; then blocks are copied page by page."""
    if ordinal is None:
        return None
    try:
        return PageCopies(ordinal, max(group.part_bytes for group in geometry.groups))
    except SwapError as error:
        log.warning("prefixd: blocks are copied page by page, which is slower: %s", error)
        return None


def object_copies_of(groups: Sequence[PagedLayers]) -> ObjectCopies:
    """The copies of an engine whose parts are int8 objects that are made on the device.

    Kernels and codec are compiled, and their results compared, before this returns.

    Args:
        groups: the caches of the engine's KV groups.

    Raises:
        ConfigError: a package or a compiler is missing, the device has no room, or it makes other objects than the
            codec on the CPU.
    """
    try:
        from prefixd_swap.codecs.on_device.object_copies import ObjectCopies

        return ObjectCopies(groups)
    except ImportError as error:
        raise ConfigError(
            f"codec_on_device: a package is missing ({error}); it needs Triton, which comes with torch for CUDA, and "
            "`pip install 'prefixd[codecs]'`"
        ) from error
    except Exception as error:  # Triton raises many kinds, for a missing C compiler RuntimeError
        why = error if isinstance(error, SwapError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"codec_on_device: {why}. Leave the option out; `codec` codes on the CPU") from error


class ArenaPin:
    """Keeps the arena that is in use registered with CUDA, so that copies run at full speed beside the model.

    For one event loop. Registering touches every page and takes a while, so a thread does it slice by slice while
    copies already run.

    Args:
        ordinal: the CUDA device.
        log: gets a warning if the arena could not be registered.
    """

    def __init__(self, ordinal: int, log: logging.Logger) -> None:
        self._ordinal = ordinal
        self._log = log
        self._arena: Arena | None = None
        self._pin: HostPin | None = None
        self._bytes: Any = None  # keeps the mapping while it is registered, also past its session's end
        self._changing = asyncio.Lock()
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @asynccontextmanager
    async def use(self, arena: Arena, check: Callable[[], None]) -> AsyncIterator[None]:
        """A context in which `arena` is registered, or being registered. Waits until no context uses an earlier arena.

        `check` raises if the arena must not be used any more.
        """
        async with self._changing:
            if self._arena is not arena:
                await self._unused.wait()
                check()
                await asyncio.to_thread(self._replace, arena)
            self._users += 1
            self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    def drop(self) -> None:
        """Ends the registration. No copy may be under way."""
        if self._pin is not None:
            self._pin.close()
        self._arena = self._bytes = self._pin = None

    def _replace(self, arena: Arena) -> None:
        self.drop()
        self._bytes = arena.bytes_at(0, arena.nbytes)
        self._pin = HostPin(arena.address, arena.nbytes, self._ordinal, self._failed)
        self._arena = arena

    def _failed(self, why: str) -> None:
        self._log.warning("prefixd: the arena could not be pinned: %s", why)
