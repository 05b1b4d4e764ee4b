"""Leases and reservations of pages: asked for in the link's thread, waited for and ended by the engine's threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from prefixd.client import (
    AsyncLease,
    AsyncReservation,
    ExhaustedError,
    LeaseLost,
    MatchResult,
    NamespaceSpec,
)
from prefixd.integrations.engine.daemon_link import Link, LinkDown
from prefixd.integrations.engine.pages_by_key.engine_pages import Bytes

T = TypeVar("T")
H = TypeVar("H", AsyncLease, AsyncReservation)

_SAVE_PAUSE_S = 1.0
_FOUND_BY_TIER = MatchResult(0, ())  # the daemon counts the leased pages as found in the tiers where they are


@dataclass(slots=True)
class Grant(Generic[H]):
    """Some holds, the memory that they are in, and the contexts that keep this memory mapped during copies."""

    holds: list[H]
    arena: Bytes
    copying: ExitStack = field(default_factory=ExitStack)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks of one path, from `first_block` on."""

    path: bytes
    first_block: int
    blocks: int


class PageGrants:
    """Asks for leases and reservations of the pages of one namespace, and ends them.

    Args:
        link: the connection to the daemon.
        spec: the namespace; its one part is a page.
        clock: seconds, monotonic.
    """

    def __init__(self, link: Link, spec: NamespaceSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = link
        self._spec = spec
        self._clock = clock
        self._save_again_s = 0.0

    @property
    def may_save(self) -> bool:
        """Whether the daemon takes new pages, and had room for the last ones or time has passed since."""
        return not self._link.draining and self._clock() >= self._save_again_s

    def start_lease(self, wanted: Wanted) -> Future[Grant[AsyncLease]]:
        """Asks for a lease of pages that a look-up has counted as asked for; the leased ones count as found."""
        return self._link.start(partial(self._acquire, [wanted], counted=True), self._limit_s(wanted.blocks))

    def lease(self, wanted: Sequence[Wanted]) -> Grant[AsyncLease]:
        """Leases of `wanted`, one each; of no blocks where none is cached. Raises LinkDown, ClientError."""
        blocks = sum(each.blocks for each in wanted)
        return self.wait(self._link.start(partial(self._acquire, wanted), self._limit_s(blocks)))

    def reserve(self, wanted: Sequence[Wanted]) -> Grant[AsyncReservation] | None:
        """A reservation for each of `wanted`; None if the daemon has no room now. Raises LinkDown, ClientError."""
        blocks = sum(each.blocks for each in wanted)
        return self.wait(self._link.start(partial(self._reserve, wanted), self._limit_s(blocks) + self._link.timeout_s))

    def run_copy(self, grant: Grant[H], copy: Callable[[], None]) -> None:
        """Runs a copy under a grant; gives the grant back if the copy fails."""
        try:
            copy()
        except BaseException:
            self.give_back(grant)
            raise

    def end(self, grant: Grant[H]) -> list[bool]:
        """Commits or releases the holds; returns for each whether its copies count. Raises LinkDown, ClientError."""
        return self.wait(self.start_end(grant))

    def start_end(self, grant: Grant[H]) -> Future[list[bool]]:
        """As `end`, without waiting."""
        return self._link.spawn(partial(self._end, grant))

    def give_back_late(self, asked: Future[Grant[AsyncLease]]) -> None:
        """Gives back a lease that was asked for ahead and is not needed any more."""
        if not asked.cancelled() and asked.exception() is None:
            self.give_back(asked.result())

    def give_back(self, grant: Grant[H]) -> None:
        """Ends the holds without waiting; their copies do not count."""

        async def end() -> None:
            grant.copying.close()
            for hold in grant.holds:
                self._link.give_back(hold)

        self._link.spawn(end).add_done_callback(self._link.report)

    def wait(self, future: Future[T]) -> T:
        """The future's result; the link's time limits bound the wait. Raises LinkDown when the link is closed."""
        try:
            return future.result()
        except CancelledError as error:
            raise LinkDown("the backend was closed during the call") from error

    async def _acquire(self, wanted: Sequence[Wanted], *, counted: bool = False) -> Grant[AsyncLease]:
        cache = await self._link.cache(self._spec)
        return await self._gather_holds(
            [
                cache.acquire(
                    tokens_of(each.path),
                    first_block=each.first_block,
                    max_blocks=each.blocks,
                    counted=False,
                    found=_FOUND_BY_TIER if counted else None,
                )
                for each in wanted
            ]
        )

    async def _reserve(self, wanted: Sequence[Wanted]) -> Grant[AsyncReservation] | None:
        cache = await self._link.cache(self._spec)
        try:
            async with asyncio.timeout(self._link.timeout_s):
                return await self._gather_holds(
                    [cache.reserve(tokens_of(each.path), first_block=each.first_block) for each in wanted]
                )
        except TimeoutError:
            # The daemon waits for the disk. The engine goes on; it computes the pages again if it needs them.
            self._save_again_s = self._clock() + _SAVE_PAUSE_S
            await self._link.probe()  # raises if the daemon is away
            return None
        except ExhaustedError:
            self._save_again_s = self._clock() + _SAVE_PAUSE_S
            return None

    async def _gather_holds(self, asked: Sequence[Coroutine[Any, Any, H]]) -> Grant[H]:
        """The holds that were asked for; if one fails or time is over, the others are given back."""
        tasks = [asyncio.create_task(each) for each in asked]
        try:
            holds = await asyncio.gather(*tasks)
            arena = self._link.arena
            if arena is None:
                raise LeaseLost("the session ended before the copy began")
            grant = Grant(holds, arena.bytes_at(0, arena.nbytes))
            try:
                for hold in holds:
                    grant.copying.enter_context(hold.copying())
            except BaseException:
                grant.copying.close()
                raise
            return grant
        except BaseException:
            for task in tasks:
                task.cancel()
                task.add_done_callback(self._give_back_late)
            raise

    def _give_back_late(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._link.give_back(task.result())

    async def _end(self, grant: Grant[H]) -> list[bool]:
        grant.copying.close()
        limit_s = self._limit_s(sum(hold.blocks for hold in grant.holds))

        async def end() -> list[bool]:
            return await asyncio.gather(*(_end_one(hold) for hold in grant.holds))

        try:
            return await self._link.guard(end, limit_s)
        except BaseException:
            for hold in grant.holds:
                self._link.give_back(hold)  # unless it has ended
            raise

    def _limit_s(self, blocks: int) -> float:
        return self._link.limit_s(blocks * self._spec.block_bytes)


def tokens_of(path: bytes) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The token ids that stand for the pages of a path, 8 a page."""
    return np.frombuffer(path, "<u4")


async def _end_one(hold: AsyncLease | AsyncReservation) -> bool:
    """Commits or releases a hold; returns whether its copies count. Raises LinkDown, ClientError."""
    try:
        if isinstance(hold, AsyncReservation):
            result = await hold.commit()
            return result.committed + result.duplicates >= hold.blocks
        await hold.release()
    except LeaseLost:
        return False
    return True
