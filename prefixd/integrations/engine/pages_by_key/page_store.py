"""One pool's pages in one namespace of prefixd: which are there, bring them, keep them.

The engine's threads call and wait; they also make the copies, so that the link's thread is free for the others. A call
is cut into slices of some pages, each with a lease or a reservation of its own:

    load    Acquire -> copy out -> Release     that the release succeeds proves that the bytes were the right ones
    save    Reserve -> copy in -> Commit

so that one that is too slow can end between two of them, with the pages that have come.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np

from prefixd.client import (
    AsyncLease,
    AsyncReservation,
    ClientError,
    ExhaustedError,
    LeaseLost,
    MatchResult,
    NamespaceSpec,
    Tier,
)
from prefixd.integrations.engine.link import Link, LinkDown
from prefixd.integrations.engine.pages_by_key.chains import KEY_BYTES, Chain, Starts
from prefixd.integrations.engine.pages_by_key.engine_pages import Bytes, Check, PagesAt, PagesUnusable
from prefixd.integrations.engine.pages_by_key.shared_copies import SharedCopies

T = TypeVar("T")
H = TypeVar("H", AsyncLease, AsyncReservation)
CopyPages: TypeAlias = Callable[[Bytes, Sequence[tuple[int, int]], Check], None]

LOAD_BYTES = 128 << 20  # at first; two slices are under way at a time
_LOAD_MOST_BYTES = 512 << 20
_LOAD_S = 0.25  # that a slice should take: every slice costs two calls, and a load can end between two of them
SAVE_BYTES = 256 << 20
SINGLES = 32  # pages by themselves that are asked for at a time
_BYTES_PER_S = 100e6  # a transfer slower than this is given up
_SAVE_PAUSE_S = 1.0
_CLEAR_S = 8.0
_CLEAR_AGAIN_S = 0.02
_ROOM_S = 2.0  # so long a load waits for room that others hold
_ROOM_PAUSE_S = 0.02
_WHERE_THEY_ARE = MatchResult(0, ())
_TROUBLES = (LinkDown, ClientError, PagesUnusable)


@dataclass(slots=True)
class Outcome:
    """What became of a call's pages, in their order."""

    done: list[bool]
    """Whether a page is there, or is kept."""
    nbytes: int = 0
    new: int = 0
    """Pages that prefixd did not have."""
    elapsed_s: float = 0.0
    cut: bool = False
    """Whether it ended because its time was over."""
    error: Exception | None = None
    """What ended it early."""

    def failed(self, error: Exception) -> None:
        """It ended early; what was done before stays."""
        self.error = error

    @property
    def pages(self) -> int:
        """Pages that are there, or are kept."""
        return sum(self.done)


@dataclass(slots=True)
class Grant(Generic[H]):
    """Some holds, the memory that they are in, and what is said of the copies under way."""

    holds: list[H]
    arena: Bytes
    copying: ExitStack = field(default_factory=ExitStack)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks of one path."""

    path: bytes
    first_block: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """A slice of a call that the daemon has been asked for: pages `at` to `stop` of a chain."""

    at: int
    stop: int
    begin: int
    """Where its path begins."""
    grant: Future[Grant[AsyncLease]]


class PageStore:
    """The pages of one pool.

    Args:
        link: the line to the daemon.
        spec: the namespace; its one part is a page.
        slice_s: the longest that a call goes on.
        copies: makes the copies.
        clock: seconds, monotonic.
        load_bytes: bytes that are loaded at a time, at first.
    """

    def __init__(
        self,
        link: Link,
        spec: NamespaceSpec,
        slice_s: float,
        copies: SharedCopies,
        clock: Callable[[], float] = time.monotonic,
        load_bytes: int = LOAD_BYTES,
    ) -> None:
        self.spec = spec
        self.page_bytes = spec.block_bytes
        self._link = link
        self._slice_s = slice_s
        self._copies = copies
        self._clock = clock
        self._slice = max(1, load_bytes // self.page_bytes)
        self._save_slice_pages = max(1, SAVE_BYTES // self.page_bytes)
        self._starts = Starts()
        self._save_again_s = 0.0

    # -- which pages are there ------------------------------------------------------------------------------------

    def leading(self, chain: Chain) -> Counter[Tier]:
        """How many pages of a call, from its first on, are cached, by the tier that they are in. Raises LinkDown,
        ClientError."""
        return self._wait(self._link.start(partial(self._leading, chain)))

    async def _leading(self, chain: Chain) -> Counter[Tier]:
        cache = await self._link.cache(self.spec)
        hits: Counter[Tier] = Counter()
        at = chain.before
        counted = True
        while at < len(chain):
            found = at
            for begin in self._starts.of(chain, at):
                match = await cache.match(_tokens(chain.part(begin)), counted=counted)
                counted = False
                if not match.blocks and begin:
                    self._starts.drop(chain.page(begin))  # it was evicted
                found = begin + match.blocks
                if found > at:
                    hits += _tiers_behind(match, at - begin)
                    break
            if found <= at:
                break
            at = found
            if at < len(chain) and chain.page(at) not in self._starts:
                break
        return hits

    def each(self, digests: bytes) -> list[bool]:
        """Which pages are cached that are paths by themselves. Raises LinkDown, ClientError."""
        return self._wait(self._link.start(partial(self._each, digests)))

    async def _each(self, digests: bytes) -> list[bool]:
        cache = await self._link.cache(self.spec)
        there: list[bool] = []
        pages = list(_pages(digests))
        for first in range(0, len(pages), SINGLES):
            found = await asyncio.gather(*(cache.match(_tokens(page)) for page in pages[first : first + SINGLES]))
            there += [match.blocks > 0 for match in found]
        return there

    def clear(self) -> None:
        """Has the daemon drop all of them. Raises LinkDown, ClientError."""
        self._wait(self._link.start(self._clear, _CLEAR_S))

    async def _clear(self) -> None:
        while await self._link.evict(self.spec):
            await asyncio.sleep(_CLEAR_AGAIN_S)  # some are on their way to the disk

    # -- loading --------------------------------------------------------------------------------------------------

    def load(self, chain: Chain, pages: PagesAt) -> Outcome:
        """Brings the pages of a call, from its first on, into the engine's memory, until one is missing or time
        is over.

        While a slice is copied the daemon leases the next, and is told of the end of the one before.
        """
        outcome = Outcome([False] * (len(chain) - chain.before))
        ending: list[tuple[range, Future[list[bool]]]] = []
        ahead: Ahead | None = None
        with _timed(outcome, self._clock):
            until_s = self._clock() + self._slice_s
            at, step = chain.before, min(self._slice, self._link.slice_blocks(self.page_bytes))
            room_until_s = self._clock() + _ROOM_S
            try:
                while at < len(chain):
                    asked, ahead = ahead or self._ahead(chain, at, step), None
                    begin, grant = self._found(chain, asked)
                    lease = grant.holds[0]
                    if lease.blocks == asked.stop - at == step < len(chain) - at:
                        ahead = self._ahead(chain, asked.stop, step, begin)
                    places = [(at - chain.before + block, lease.offset(block)) for block in range(lease.blocks)]
                    self._copied(grant, partial(self._copy, pages, pages.load, grant, places))
                    ended = self._link.spawn(partial(self._end, grant))
                    if lease.blocks:
                        ending.append((range(at, at + lease.blocks), ended))
                        at += lease.blocks
                        room_until_s = self._clock() + _ROOM_S
                    elif lease.cached_blocks <= at - begin:
                        break
                    # There is no room: first what is held here goes, then what others hold is waited for.
                    elif self._collect(ending, outcome, chain):
                        if self._clock() >= room_until_s:
                            break
                        time.sleep(_ROOM_PAUSE_S)
                    if at < len(chain) and self._clock() >= until_s:
                        outcome.cut = True
                        break
            except _TROUBLES as error:
                outcome.failed(error)
            finally:
                if ahead is not None:
                    ahead.grant.add_done_callback(self._give_back_grant)
            self._collect(ending, outcome, chain)
            outcome.nbytes = outcome.pages * self.page_bytes
        if outcome.nbytes >= LOAD_BYTES // 2 and outcome.elapsed_s > 0:
            nbytes = min(_LOAD_S * outcome.nbytes / outcome.elapsed_s, _LOAD_MOST_BYTES)
            self._slice = max(1, int(nbytes) // self.page_bytes)
        return outcome

    def _collect(self, ending: list[tuple[range, Future[list[bool]]]], outcome: Outcome, chain: Chain) -> bool:
        """Waits for the ends of slices and notes which pages count; True when there were none to wait for."""
        waited, ending[:] = list(ending), []
        for pages, ended in waited:
            try:
                came = self._wait(ended)[0]
            except _TROUBLES as error:
                outcome.failed(error)
                continue
            for page in pages:
                outcome.done[page - chain.before] = came
        return not waited

    def _ahead(self, chain: Chain, at: int, step: int, begin: int | None = None) -> Ahead:
        """Has `step` pages from page `at` on leased, or as many as there are; their path begins at `begin` (None: the
        nearest that may have them)."""
        stop = min(at + step, len(chain))
        if begin is None:
            begin = self._starts.of(chain, at)[0]
        wanted = Wanted(chain.part(begin, stop), at - begin, stop - at)
        limit_s = self._limit_s(wanted.blocks)
        return Ahead(at, stop, begin, self._link.start(partial(self._acquire, [wanted], counted=True), limit_s))

    def _found(self, chain: Chain, asked: Ahead) -> tuple[int, Grant[AsyncLease]]:
        """Where the path begins that has the slice, and the lease; one of no blocks where none has it."""
        begin, grant = asked.begin, self._wait(asked.grant)
        others = [other for other in self._starts.of(chain, asked.at) if other != begin]
        while not grant.holds[0].blocks and grant.holds[0].cached_blocks <= asked.at - begin and others:
            self._given_back(grant)
            begin = others.pop(0)
            grant = self._wait(self._ahead(chain, asked.at, asked.stop - asked.at, begin).grant)
        return begin, grant

    def load_each(self, digests: bytes, pages: PagesAt) -> Outcome:
        """As `load`, for pages that are paths by themselves: each that is there comes, the last first.

        Of a window the pages at its end are the ones that shorter windows have, too.
        """
        all_pages = list(_pages(digests))
        outcome = Outcome([False] * len(all_pages))
        with _timed(outcome, self._clock):
            until_s = self._clock() + self._slice_s
            step = min(self._slice, SINGLES)
            for first in range(0, len(all_pages), step):
                if first and self._clock() >= until_s:
                    outcome.cut = True
                    break
                wanted = [Wanted(page, 0, 1) for page in all_pages[first : first + step]]
                try:
                    came = self._load_singles(wanted, first, pages)
                except _TROUBLES as error:
                    outcome.failed(error)
                    break
                outcome.done[first : first + len(came)] = came
            outcome.nbytes = outcome.pages * self.page_bytes
        return outcome

    def _load_singles(self, wanted: Sequence[Wanted], first: int, pages: PagesAt) -> list[bool]:
        grant = self._acquired(wanted)

        def copy() -> None:
            for place, lease in enumerate(grant.holds):
                if lease.blocks:
                    pages.load(grant.arena, [(first + place, lease.offset(0))], lease.check)

        self._copied(grant, copy)
        released = self._ended(grant)
        return [ok and lease.blocks > 0 for ok, lease in zip(released, grant.holds, strict=True)]

    # -- saving ---------------------------------------------------------------------------------------------------

    def save(self, chain: Chain, pages: PagesAt) -> Outcome:
        """Gives prefixd the pages of a call that it does not have, from the first on, until there is no room or time is
        over."""
        outcome = Outcome([False] * (len(chain) - chain.before))
        with _timed(outcome, self._clock):
            until_s = self._clock() + self._slice_s
            at = chain.before
            while at < len(chain) and self._may_save():
                stop = min(at + self._save_slice_pages, len(chain))
                try:
                    kept, new = self._save_slice(chain, at, stop, pages)
                except _TROUBLES as error:
                    outcome.failed(error)
                    break
                outcome.new += new
                for page in range(at, kept):
                    outcome.done[page - chain.before] = True
                if kept <= at:
                    break
                at = kept
                if at < len(chain) and self._clock() >= until_s:
                    outcome.cut = True
                    break
            outcome.nbytes = outcome.new * self.page_bytes
        return outcome

    def _save_slice(self, chain: Chain, at: int, stop: int, pages: PagesAt) -> tuple[int, int]:
        """Keeps pages `at` to `stop`: up to which page they are kept now, and how many are new."""
        begin, grant = self._room(chain, at, stop)
        if grant is None:
            return at, 0
        reservation = grant.holds[0]
        if not reservation.blocks:
            self._given_back(grant)
            return stop, 0
        first = begin + reservation.first_block
        places = [(first - chain.before + block, reservation.offset(block)) for block in range(reservation.blocks)]
        self._copied(grant, partial(self._copy, pages, pages.save, grant, places))
        if not self._ended(grant)[0]:
            return at, 0
        return first + reservation.blocks, reservation.blocks

    def _room(self, chain: Chain, at: int, stop: int) -> tuple[int, Grant[AsyncReservation] | None]:
        """Where the path of pages `at` to `stop` begins, and slots for them; None where there are none now."""
        for begin in self._starts.of(chain, at):
            grant = self._reserved([Wanted(chain.part(begin, stop), at - begin, stop - at)])
            if grant is None or not grant.holds[0].blocks or grant.holds[0].first_block >= at - begin:
                return begin, grant
            self._given_back(grant)  # prefixd has lost pages before these
            self._starts.drop(chain.page(begin))
        self._starts.add(chain.page(at))
        return at, self._reserved([Wanted(chain.part(at, stop), 0, stop - at)])

    def save_each(self, digests: bytes, pages: PagesAt) -> Outcome:
        """As `save`, for pages that are paths by themselves."""
        all_pages = list(_pages(digests))
        outcome = Outcome([False] * len(all_pages))
        with _timed(outcome, self._clock):
            until_s = self._clock() + self._slice_s
            step = min(self._slice, SINGLES)
            for first in range(0, len(all_pages), step):
                if not self._may_save():
                    break
                if first and self._clock() >= until_s:
                    outcome.cut = True
                    break
                wanted = [Wanted(page, 0, 1) for page in all_pages[first : first + step]]
                try:
                    kept, new = self._save_singles(wanted, first, pages)
                except _TROUBLES as error:
                    outcome.failed(error)
                    break
                outcome.new += new
                outcome.done[first : first + len(kept)] = kept
            outcome.nbytes = outcome.new * self.page_bytes
        return outcome

    def _save_singles(self, wanted: Sequence[Wanted], first: int, pages: PagesAt) -> tuple[list[bool], int]:
        if (grant := self._reserved(wanted)) is None:
            return [False] * len(wanted), 0

        def copy() -> None:
            for place, reservation in enumerate(grant.holds):
                if reservation.blocks:
                    pages.save(grant.arena, [(first + place, reservation.offset(0))], reservation.check)

        self._copied(grant, copy)
        committed = self._ended(grant)
        new = sum(ok and reservation.blocks > 0 for ok, reservation in zip(committed, grant.holds, strict=True))
        return committed, new

    def _may_save(self) -> bool:
        return not self._link.draining and self._clock() >= self._save_again_s

    # -- grants ---------------------------------------------------------------------------------------------------

    def _acquired(self, wanted: Sequence[Wanted]) -> Grant[AsyncLease]:
        blocks = sum(each.blocks for each in wanted)
        return self._wait(self._link.start(partial(self._acquire, wanted), self._limit_s(blocks)))

    async def _acquire(self, wanted: Sequence[Wanted], *, counted: bool = False) -> Grant[AsyncLease]:
        """Leases; `counted`: they count as found, of pages that `leading` has counted as asked for."""
        cache = await self._link.cache(self.spec)
        return await self._all(
            [
                cache.acquire(
                    _tokens(each.path),
                    first_block=each.first_block,
                    max_blocks=each.blocks,
                    counted=False,
                    found=_WHERE_THEY_ARE if counted else None,
                )
                for each in wanted
            ]
        )

    def _reserved(self, wanted: Sequence[Wanted]) -> Grant[AsyncReservation] | None:
        """Slots; None when there are none now."""
        blocks = sum(each.blocks for each in wanted)
        return self._wait(
            self._link.start(partial(self._reserve, wanted), self._limit_s(blocks) + self._link.timeout_s)
        )

    async def _reserve(self, wanted: Sequence[Wanted]) -> Grant[AsyncReservation] | None:
        cache = await self._link.cache(self.spec)
        try:
            async with asyncio.timeout(self._link.timeout_s):
                return await self._all(
                    [cache.reserve(_tokens(each.path), first_block=each.first_block) for each in wanted]
                )
        except TimeoutError:
            # It waits for the disk. What cannot be kept now is computed again one day; the engine does not wait.
            self._save_again_s = self._clock() + _SAVE_PAUSE_S
            await self._link.ask()  # unless it is away
            return None
        except ExhaustedError:
            self._save_again_s = self._clock() + _SAVE_PAUSE_S
            return None

    async def _all(self, asked: Sequence[Coroutine[Any, Any, H]]) -> Grant[H]:
        """What was asked for; where one fails, or time is over, the others are given back."""
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

    def _copy(self, pages: PagesAt, way: CopyPages, grant: Grant[H], places: Sequence[tuple[int, int]]) -> None:
        """Copies the pages of a grant of one hold."""
        check = grant.holds[0].check
        if pages.by_threads:
            self._copies.copy(lambda some: way(grant.arena, some, check), places, len(places) * self.page_bytes)
        else:
            way(grant.arena, places, check)

    def _copied(self, grant: Grant[H], copy: Callable[[], None]) -> None:
        """Copies; where that fails, nothing of it counts."""
        try:
            copy()
        except BaseException:
            self._given_back(grant)
            raise

    def _ended(self, grant: Grant[H]) -> list[bool]:
        """Ends the holds: of each, whether what was copied counts."""
        return self._wait(self._link.spawn(partial(self._end, grant)))

    def _give_back_grant(self, asked: Future[Grant[AsyncLease]]) -> None:
        """For what was asked for ahead and is not needed any more."""
        if not asked.cancelled() and asked.exception() is None:
            self._given_back(asked.result())

    def _given_back(self, grant: Grant[H]) -> None:
        """Ends the holds; nothing that was copied counts."""

        async def end() -> None:
            grant.copying.close()
            for hold in grant.holds:
                self._link.give_back(hold)

        self._link.spawn(end).add_done_callback(self._link.report)

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
        """How long the daemon may take for a call that may have to wait for the blocks' bytes."""
        return self._link.timeout_s + blocks * self.page_bytes / _BYTES_PER_S

    def _wait(self, future: Future[T]) -> T:
        """The result; the link's thread bounds the wait."""
        try:
            return future.result()
        except CancelledError as error:
            raise LinkDown("the backend was closed during the call") from error


async def _end_one(hold: AsyncLease | AsyncReservation) -> bool:
    """Whether what was copied under it counts. Raises what says that the daemon is away."""
    try:
        if isinstance(hold, AsyncReservation):
            result = await hold.commit()
            return result.committed + result.duplicates >= hold.blocks
        await hold.release()
    except LeaseLost:
        return False
    return True


@contextmanager
def _timed(outcome: Outcome, clock: Callable[[], float]) -> Iterator[None]:
    began_s = clock()
    yield
    outcome.elapsed_s = clock() - began_s


def _tiers_behind(match: MatchResult, blocks: int) -> Counter[Tier]:
    """Of what was found behind the first `blocks` blocks, how many are in which tier."""
    tiers: Counter[Tier] = Counter()
    for run in match.runs:
        tiers[run.tier] += max(0, run.blocks - blocks)
        blocks = max(0, blocks - run.blocks)
    return +tiers


def _tokens(path: bytes) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """The token ids that stand for the pages of a path."""
    return np.frombuffer(path, "<u4")


def _pages(digests: bytes) -> Iterator[bytes]:
    return (digests[at : at + KEY_BYTES] for at in range(0, len(digests), KEY_BYTES))
