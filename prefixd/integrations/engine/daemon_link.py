"""An engine's connection to the daemon: the SDK in a thread of its own, behind a circuit breaker.

An engine's threads must never wait for a daemon that is away or slow. So every call runs in the link's thread and has a
time limit. A call without an answer opens the breaker: calls fail at once until a probe in the background is answered.
The log says once that the daemon went away, and once that it is back. The pauses before the next probe double while the
daemon answers the probe and then lets calls time out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from prefixd.base.errors import ConfigError
from prefixd.client import (
    Arena,
    AsyncCache,
    AsyncClient,
    AsyncLease,
    AsyncReservation,
    ClientClosed,
    ClientError,
    ForkedProcess,
    InvalidArgumentError,
    LeaseLost,
    MemoryUnavailable,
    NamespaceSpec,
    NewSession,
    ServerUnavailable,
    Unauthenticated,
    default_address,
)
from prefixd.client.connecting.portal import Portal
from prefixd.client.memory.slices import SLICE_SHARE
from prefixd.v1.cache_pb2 import BlockChange

T = TypeVar("T")

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 1.0
_LONGEST_REST_S = 8.0  # before the next probe of a daemon that answers probes and no other call in time
_STEADY_S = 30.0  # without a failure, after which the rest is short again
_CALL_S = 120.0  # never reached: each call gets a shorter limit here
_BYTES_PER_S = 100e6  # a slower transfer is given up
_NAMESPACES = 1024


class LinkDown(Exception):
    """The daemon did not answer, or the breaker is open since an earlier call without an answer."""


class Link:
    """One engine process's connection to its daemon. Its methods may be called from any thread.

    Args:
        address: the daemon's unix socket; None for the default one.
        name: of the client, as `prefixd stats` shows it.
        timeout_s: time limit of a call that has none of its own.
        log: the connector's logger, below the engine's own.

    Raises:
        ConfigError: the address is no unix socket, or no client works in this process (`ForkedProcess`).
    """

    def __init__(self, address: str | None, name: str, timeout_s: float, log: logging.Logger) -> None:
        self.address = default_address() if address is None else address
        if not self.address.startswith(("unix:", "/")):
            raise ConfigError(
                f"address = {self.address!r}: an engine copies through memory that it shares with the daemon; give the "
                'unix socket ("unix:/path") of a daemon on this host'
            )
        self.timeout_s = timeout_s
        self.log = log
        try:
            self._client = AsyncClient(
                self.address,
                name=f"{name} {os.getpid()}",
                memory="shared",
                timeout_s=_CALL_S,
                on_new_session=self._on_new_session,
            )
        except ForkedProcess as error:
            raise ConfigError(str(error)) from error
        except InvalidArgumentError as error:
            raise ConfigError(f"address = {self.address!r}: {error}") from error
        self._portal = Portal()
        self._caches: dict[NamespaceSpec, AsyncCache] = {}
        self._up = False
        self._closed = False
        self._logged_down = False
        self._replaced = False  # another daemon's data since the log said that it is away
        self._slow = False  # a call timed out since the last probe
        self._opened = asyncio.Event()
        self._probed = threading.Event()
        self._watching = self._portal.start(self._probe_while_away())

    @property
    def up(self) -> bool:
        """Whether the breaker is closed: the daemon gave a session and answered the last call."""
        return self._up

    def wait_first(self) -> bool:
        """Waits for the end of the first probe; returns whether the daemon answered it."""
        self._probed.wait()
        return self._up

    def start(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None = None) -> Future[T]:
        """Runs the coroutine that `work` makes in the link's thread.

        The future fails with `LinkDown` when the daemon is away, or does not answer within `timeout_s` (None: the
        link's own), or the link is closed, and with the SDK's errors for what the daemon refuses.
        """
        return self.spawn(lambda: self.guard(work, timeout_s))

    def spawn(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """As `start`, for a coroutine that guards its calls itself. Fails with `LinkDown` when the link is closed."""
        try:
            return self._portal.start(work())
        except ClientClosed as error:
            failed: Future[T] = Future()
            failed.set_exception(LinkDown(str(error)))
            return failed

    def give_back(self, hold: AsyncLease | AsyncReservation) -> None:
        """Ends an unneeded hold without waiting for the answer: the daemon may be the reason of the failure."""
        if not self._closed:  # a closed session has ended its holds
            self.spawn(partial(_end, hold)).add_done_callback(self.report)

    async def guard(self, work: Callable[[], Coroutine[Any, Any, T]], timeout_s: float | None = None) -> T:
        """As `start`, for callers in the link's thread."""
        if not self._up:
            raise LinkDown(f"the daemon at {self.address} is away")
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await work()
        except (ServerUnavailable, MemoryUnavailable, Unauthenticated) as error:  # Unauthenticated: an outdated ticket
            self._open_breaker(_reason(error))
            raise LinkDown(str(error)) from error
        except ClientClosed as error:
            raise LinkDown(str(error)) from error
        except LeaseLost:
            raise
        except ClientError as error:
            if self._client.arena is None:  # the daemon refused a session
                self._open_breaker(str(error))
            raise
        except TimeoutError as error:
            reason = f"no answer from the daemon at {self.address} within {limit_s:g} s"
            self._slow = True
            self._open_breaker(reason)
            raise LinkDown(reason) from error

    async def cache(self, spec: NamespaceSpec) -> AsyncCache:
        """The registered namespace. For use in the link's thread, inside `guard`."""
        known = self._caches.pop(spec, None)
        if known is None:
            known = await self._client.register(spec)
            if len(self._caches) >= _NAMESPACES:
                self._caches.pop(next(iter(self._caches)))  # the least recently used
        self._caches[spec] = known
        return known

    async def reopen(self, spec: NamespaceSpec) -> None:
        """Registers a namespace again, in the present session, which may be a new one. For the link's thread."""
        self._caches.pop(spec, None)
        await self.cache(spec)

    def spec_of(self, namespace_id: bytes) -> NamespaceSpec | None:
        """The namespace with this id, if it is among the last used ones. For use in the link's thread."""
        return next((spec for spec, cache in self._caches.items() if cache.namespace_id == namespace_id), None)

    def watch_blocks(self) -> AsyncGenerator[BlockChange, None]:
        """Changes of the blocks that the daemon has of this link's namespaces (`AsyncClient.watch_blocks`).

        For use in the link's thread, without a time limit.
        """
        return self._client.watch_blocks()

    async def evict(self, spec: NamespaceSpec) -> int:
        """Drops the daemon's blocks of a namespace; returns how many it keeps because they are held.

        For use in the link's thread, inside `guard`.
        """
        known = await self.cache(spec)
        return int((await self._client.evict(namespace_id=known.namespace_id)).kept_blocks)

    async def probe(self) -> None:
        """Returns when the daemon has given a session and answered a call. For use in the link's thread."""
        await self._client.session()
        try:
            await self._client.stats()
        except (ServerUnavailable, Unauthenticated, TimeoutError):
            raise
        except ClientError:
            pass  # Stats is an operator's call; other clients may have a session all the same

    @property
    def draining(self) -> bool:
        """Whether the daemon is about to end: it answers calls and takes no new blocks."""
        return self._client.draining

    @property
    def arena(self) -> Arena | None:
        """The daemon's memory as mapped here; None while there is no session."""
        return self._client.arena

    def slice_blocks(self, block_bytes: int) -> int:
        """How many blocks of `block_bytes` one lease may have, so that other loads find room beside it."""
        arena = self.arena
        return max(1, (0 if arena is None else arena.nbytes) // SLICE_SHARE // block_bytes)

    def limit_s(self, nbytes: int) -> float:
        """Time limit of a call that may wait until the daemon has read or written `nbytes`."""
        return self.timeout_s + nbytes / _BYTES_PER_S

    def report(self, done: Future[Any]) -> None:
        """Logs the error of a task that should not fail."""
        if not done.cancelled() and (error := done.exception()) is not None and not isinstance(error, LinkDown):
            self.log.error("prefixd: a task of the connector failed", exc_info=error)

    def close(self) -> None:
        """Ends the session, and with it every lease and reservation."""
        if self._closed:
            return
        self._closed = True
        self._up = False
        self._watching.cancel()
        self._probed.set()
        with suppress(ClientClosed):
            self._portal.run(self._client.close())
        self._portal.stop()

    # -- in the link's thread -----------------------------------------------------------------------------------

    def _open_breaker(self, reason: str) -> None:
        if not self._up:
            return
        self._up = False
        self._opened.set()
        self._log_down(reason)

    def _log_down(self, reason: str) -> None:
        if not self._logged_down and not self._closed:
            self._logged_down = True
            self.log.warning(
                "prefixd is away: %s. The engine goes on without it and looks for it again by itself.", reason
            )

    def _on_new_session(self, new: NewSession) -> None:
        if self._logged_down:  # the line that the daemon is back says so
            self._replaced |= new.other_data
        else:
            self.log.warning("prefixd at %s has opened another session for the engine: %s.", self.address, new)

    async def _probe_while_away(self) -> None:
        """Probes the daemon until it answers; waits for the breaker to open; probes again."""
        pause_s = rest_s = _FIRST_PAUSE_S
        while True:
            self._opened.clear()
            self._slow = False
            try:
                async with asyncio.timeout(self.timeout_s):
                    await self.probe()
            except Exception as error:
                if not isinstance(error, ClientError | TimeoutError):
                    self.log.error("prefixd: looking for the daemon failed", exc_info=error)
                self._log_down(
                    _reason(error) or f"no answer from the daemon at {self.address} within {self.timeout_s:g} s"
                )
                self._probed.set()
                await _pause(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                continue
            pause_s = _FIRST_PAUSE_S
            if self._logged_down:
                changed = f": {NewSession('', True)}" if self._replaced else ""
                self.log.warning("prefixd is back at %s%s.", self.address, changed)
            else:
                self.log.info("prefixd is at %s.", self.address)
            self._logged_down = self._replaced = False
            self._up = True  # last, so that the log line precedes calls of other threads
            self._probed.set()
            since_s = time.monotonic()
            await self._opened.wait()
            if time.monotonic() - since_s >= _STEADY_S:
                rest_s = _FIRST_PAUSE_S
            elif self._slow:
                await _pause(rest_s)
                rest_s = min(_LONGEST_REST_S, 2 * rest_s)


_pause = asyncio.sleep


def _reason(error: Exception) -> str:
    """Why the daemon is of no use, for the log. A connector copies between the engine's pages and addresses in the
    daemon's memory; streamed bytes would need memory and a copy of their own."""
    if isinstance(error, MemoryUnavailable):
        return f"it gives the engine none of its memory, which is the only way of a connector: {error}"
    return str(error)


async def _end(hold: AsyncLease | AsyncReservation) -> None:
    with suppress(ClientError):  # the hold, or the daemon, has ended already
        await hold.release()
